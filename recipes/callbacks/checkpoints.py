"""Saves the run's state at intervals, at its end, when it is asked to stop and when it is stuck; and loads it back.

Every rank saves and loads its own part.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel import checkpoint
from parallel.checkpoint import StateProvider
from parallel.states import ModuleState, RandomState
from recipes.trainer import Callback, Progress, StepResult, Trainer


class Checkpoints(Callback):
    """Writes `folder/step_N` every `every` steps (0: only at the end), or after the skipped steps there. `facts` goes into its
    state.json.
    """

    def __init__(self, folder: Path, *, every: int, keep_last: int, facts: dict[str, Any]):
        self.folder = folder
        self.every = every
        self.keep_last = keep_last
        self.facts = facts
        self.good: _Moment | None = None
        self.due = False

    def start(self, trainer: Trainer) -> None:
        self.good = _Moment(trainer)

    def step(self, trainer: Trainer, result: StepResult) -> None:
        self.due |= self.every > 0 and result.step % self.every == 0
        # not amid skipped steps but after them: if they lead to nothing, the last checkpoint is from before
        if self.due and not result.report.skipped:
            self.save(trainer)
            self.due = False
        if not result.report.skipped:
            self.good = _Moment(trainer)

    def stuck(self, trainer: Trainer) -> None:
        # skipped steps changed no tensor but counters: the last good state is what is there, with the counters of then
        if self.good is not None and self.good.progress.step > 0:
            self._write(trainer, self.good)

    def end(self, trainer: Trainer) -> None:
        trainer.results["checkpoint"] = str(self.save(trainer))

    def save(self, trainer: Trainer) -> Path:
        return self._write(trainer, _Moment(trainer))

    def _write(self, trainer: Trainer, at: _Moment) -> Path:
        facts = self.facts | {"progress": dataclasses.asdict(at.progress), "data_position": at.data_position}
        facts["versions"] = {"python": platform.python_version(), "torch": torch.__version__}
        world = trainer.objective.world
        stored = providers(trainer) | {
            "optimizer": _Given(trainer.optimizer.state_dict() | at.counters),
            "random": _Given(at.random),
        }
        return checkpoint.save(self.folder, at.progress.step, stored, facts, keep_last=self.keep_last, world=world)


class _Moment:
    """What even a skipped step moves on, as it stands now."""

    def __init__(self, trainer: Trainer):
        self.progress = dataclasses.replace(trainer.progress)
        self.data_position = trainer.stream.position
        self.counters = {name: tensor.clone() for name, tensor in trainer.optimizer.counters().items()}
        self.random = RandomState().state_dict()


@dataclasses.dataclass(frozen=True)
class _Given:
    """A state provider of tensors that are there already."""

    tensors: Mapping[str, Tensor]

    def state_dict(self) -> Mapping[str, Tensor]:
        return self.tensors

    def load_state_dict(self, state: Mapping[str, Tensor], /) -> None:
        raise NotImplementedError("is only written")


def providers(trainer: Trainer) -> dict[str, StateProvider]:
    """What a checkpoint stores; the router biases and their averages are buffers of the model."""
    return {"model": ModuleState(trainer.module), "optimizer": trainer.optimizer, "random": RandomState()}


def restore(trainer: Trainer, path: Path) -> None:
    """Loads a checkpoint into a freshly built trainer, whose stream already stands at the checkpoint's position.

    Raises parallel.checkpoint.CheckpointError, naming every difference, where it does not fit.
    """
    facts = checkpoint.load(path, providers(trainer), trainer.objective.world)
    trainer.progress = Progress(**facts["progress"])
