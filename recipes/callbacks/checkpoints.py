"""Saves the run's state at intervals, at its end, when it is asked to stop and when it is stuck; and loads it back.

Every rank saves and loads its own part.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import k3
from parallel import checkpoint
from parallel.boxes import Box, StateProvider
from parallel.states import ModuleState, RandomState
from parallel.together import from_first
from recipes.config import CheckpointConfig
from recipes.console import say
from recipes.trainer import Callback, Progress, StepResult, Trainer


class Checkpoints(Callback):
    """Writes `folder/step_N` every `cfg.every` steps (0: only at the end), or after the skipped steps that fall on one.

    `facts` goes into its state.json.

    The step after a save carries its times in its metrics: this callback comes before the one that writes them.
    """

    def __init__(self, folder: Path, cfg: CheckpointConfig, facts: dict[str, Any]):
        self.folder = folder
        self.cfg = cfg
        self.facts = facts
        self.good: _Moment | None = None
        self.due = False
        self.saver: checkpoint.Saver | None = None

    def start(self, trainer: Trainer) -> None:
        self.good = _Moment(trainer)
        keep = {"keep_last": self.cfg.keep_last, "keep_every": self.cfg.keep_every}
        self.saver = checkpoint.Saver(self.folder, trainer.objective.world, asynchronous=self.cfg.asynchronous, **keep)

    def gradients(self, trainer: Trainer) -> None:
        self._saver.poll()

    def step(self, trainer: Trainer, result: StepResult) -> None:
        result.metrics |= self._saver.timings()

    def after(self, trainer: Trainer, result: StepResult) -> None:
        """Behind the metrics of the step: a checkpoint never knows of a step that they do not."""
        self.due |= self.cfg.every > 0 and result.step % self.cfg.every == 0
        # not amid skipped steps but after them: if they lead to nothing, the last checkpoint is from before
        if self.due and not result.report.skipped:
            self.save(trainer)
            self.due = False
        if not result.report.skipped:
            self.good = _Moment(trainer)

    def stuck(self, trainer: Trainer) -> None:
        # skipped steps changed no tensor but counters: the last good state is what is there, with the counters of then
        # a stream with a state of its own has gone on: then the last checkpoint must do
        if self.good is not None and self.good.progress.step > 0 and trainer.keeps is None:
            self._write(trainer, self.good)
        self._saver.wait()

    def end(self, trainer: Trainer) -> None:
        trainer.results["checkpoint"] = str(self.save(trainer))
        self._saver.wait()
        trainer.results["saving"] = self._saver.timings()  # no step follows whose metrics could carry them

    def close(self, trainer: Trainer) -> None:
        if self.saver is not None and (failure := self.saver.close()):
            say(failure)

    def save(self, trainer: Trainer) -> Path:
        return self._write(trainer, _Moment(trainer))

    @property
    def _saver(self) -> checkpoint.Saver:
        assert self.saver is not None, "start comes first"
        return self.saver

    def _write(self, trainer: Trainer, at: _Moment) -> Path:
        facts = self.facts | {"progress": dataclasses.asdict(at.progress), "data_position": at.data_position}
        facts["versions"] = {"python": platform.python_version(), "torch": torch.__version__}
        if trainer.keeps is not None:
            facts["stream"] = trainer.keeps.facts()
        now = providers(trainer)
        stored = now | {"optimizer": _At(now["optimizer"], at.counters), "random": _At(now["random"], at.random)}
        return self._saver.save(at.progress.step, stored, facts)


class _Moment:
    """What even a skipped step moves on, as it stands now."""

    def __init__(self, trainer: Trainer):
        self.progress = dataclasses.replace(trainer.progress)
        self.data_position = trainer.stream.position
        self.counters = {name: tensor.clone() for name, tensor in trainer.optimizer.counters().items()}
        self.random = RandomState().tensors()


@dataclasses.dataclass(frozen=True)
class _At:
    """A state provider to be saved, with some of its whole tensors as they were at another moment."""

    now: StateProvider
    then: Mapping[str, Tensor]

    @property
    def per_rank(self) -> bool:
        return self.now.per_rank

    def boxes(self) -> Iterator[Box]:
        for box in self.now.boxes():
            yield dataclasses.replace(box, tensor=self.then.get(box.name, box.tensor))

    def loaded(self, anew: int | None = None) -> None:
        raise NotImplementedError("is only saved")


def providers(trainer: Trainer) -> dict[str, StateProvider]:
    """What a checkpoint stores; the router biases and their averages are buffers of the model."""
    model = ModuleState(trainer.module, k3.cards(trainer.module), trainer.objective.world)
    kept = {} if trainer.keeps is None else {"stream": trainer.keeps.provider}
    return {"model": model, "optimizer": trainer.optimizer, "random": RandomState(), **kept}


def restore(trainer: Trainer, path: Path) -> None:
    """Loads a checkpoint into a freshly built trainer, whose stream already stands at the checkpoint's position.

    Raises parallel.checkpoint.CheckpointError, naming what differs, where it does not fit.
    """
    if trainer.keeps is not None:
        trainer.keeps.take(from_first(trainer.objective.world, lambda: checkpoint.facts(path))["stream"])
    facts = checkpoint.load(path, providers(trainer), trainer.objective.world)
    trainer.progress = Progress(**facts["progress"])
