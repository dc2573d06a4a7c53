"""Saves the run's state at intervals, at its end and when it is asked to stop; and loads it back. Every rank its own part."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path
from typing import Any

import torch

from parallel import checkpoint
from parallel.checkpoint import StateProvider
from parallel.states import ModuleState, RandomState
from recipes.trainer import Callback, Progress, StepResult, Trainer


class Checkpoints(Callback):
    """Writes `folder/step_N` every `every` steps (0: only at the end). `facts` goes into its state.json."""

    def __init__(self, folder: Path, *, every: int, keep_last: int, facts: dict[str, Any]):
        self.folder = folder
        self.every = every
        self.keep_last = keep_last
        self.facts = facts

    def step(self, trainer: Trainer, result: StepResult) -> None:
        # not amid skipped steps: if they lead to nothing, the last checkpoint is from before them
        if self.every > 0 and result.step % self.every == 0 and not result.report.skipped:
            self.save(trainer)

    def end(self, trainer: Trainer) -> None:
        trainer.results["checkpoint"] = str(self.save(trainer))

    def save(self, trainer: Trainer) -> Path:
        facts = self.facts | {"progress": dataclasses.asdict(trainer.progress), "data_position": trainer.stream.position}
        facts["versions"] = {"python": platform.python_version(), "torch": torch.__version__}
        world = trainer.objective.world
        return checkpoint.save(
            self.folder, trainer.progress.step, providers(trainer), facts, keep_last=self.keep_last, world=world
        )


def providers(trainer: Trainer) -> dict[str, StateProvider]:
    """What a checkpoint stores; the router biases and their averages are buffers of the model."""
    return {"model": ModuleState(trainer.module), "optimizer": trainer.optimizer, "random": RandomState()}


def restore(trainer: Trainer, path: Path) -> None:
    """Loads a checkpoint into a freshly built trainer, whose stream already stands at the checkpoint's position.

    Raises parallel.checkpoint.CheckpointError, naming every difference, where it does not fit.
    """
    facts = checkpoint.load(path, providers(trainer), trainer.objective.world)
    trainer.progress = Progress(**facts["progress"])
