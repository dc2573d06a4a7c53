"""The training loop: one step after another, and callbacks with one job each around it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from data.batch import StepBatch
from optim.optimizer import Optimizer, StepReport
from parallel.boxes import StateProvider
from parallel.schedule import ParallelModel, run_step
from recipes.objective import Objective


class TrainingError(RuntimeError):
    """Training cannot go on; the message says since when and what to do."""


class Steps(Protocol):
    """Global batches, one a step; `position` is how many were taken, and where a resume begins."""

    position: int

    def __next__(self) -> StepBatch: ...


@dataclass
class StepResult:
    """One finished step. Callbacks read it, and add what they measure to `metrics` (flat names, JSON values)."""

    step: int  # from 1
    losses: list[float]  # what the objective's `names` say: the next token's in nats, then each MTP layer's
    tokens: int  # of this step, over all data ranks
    sequences: int  # as many, in rows
    seconds: float
    report: StepReport
    metrics: dict[str, Any] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)  # for the line of progress


@dataclass
class Progress:
    """What a resume restores beside the tensors."""

    step: int = 0
    tokens: int = 0
    train_seconds: float = 0.0  # of steps alone: no evaluation, no saving
    skipped_in_a_row: int = 0


class Callback:
    """Every method is optional. Callbacks run in the order of the list; `close` runs in reverse, also after an error."""

    def start(self, trainer: Trainer) -> None:
        """Before the first step of this process."""

    def gradients(self, trainer: Trainer) -> None:
        """Between the backward passes of a step and the optimizer: gradients are complete."""

    def step(self, trainer: Trainer, result: StepResult) -> None:
        """After each optimizer step."""

    def after(self, trainer: Trainer, result: StepResult) -> None:
        """After every callback's `step`: what the step has left is written down."""

    def stuck(self, trainer: Trainer) -> None:
        """When too many steps in a row were skipped, before training ends with an error."""

    def end(self, trainer: Trainer) -> None:
        """After the last step of this process, whether the run is complete or was asked to stop."""

    def complete(self, trainer: Trainer) -> None:
        """After `end`, when all steps are done."""

    def close(self, trainer: Trainer) -> None:
        """Always, and last."""


class Keeps(Protocol):
    """A stream with a state of its own, beside its position."""

    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps as JSON. Every rank must call it."""

    def take(self, facts: dict[str, Any]) -> None:
        """Goes on from a checkpoint's facts, before the tensors of `provider` are loaded."""

    @property
    def provider(self) -> StateProvider:
        """Its tensors."""


class Trainer:
    """Trains a model up to a number of steps. `results` is where callbacks leave what later ones report."""

    def __init__(
        self,
        model: ParallelModel,
        optimizer: Optimizer,
        stream: Steps,
        objective: Objective,
        *,
        callbacks: Sequence[Callback] = (),
        progress: Progress | None = None,
        asked_to_stop: Callable[[], bool] = lambda: False,
        keeps: Keeps | None = None,
    ):
        self.model = model
        self.module = model.module
        self.optimizer = optimizer
        self.stream = stream
        self.objective = objective
        self.callbacks = list(callbacks)
        self.progress = progress or Progress()
        self.asked_to_stop = asked_to_stop
        self.keeps = keeps
        self.steps = 0
        self.results: dict[str, Any] = {}

    def run(self, steps: int) -> bool:
        """Trains until `steps` steps are done in all, those before a resume included. Returns whether they are.

        Raises TrainingError after `optim.guard.max_skipped` skipped steps in a row.
        """
        self.steps = steps
        self.module.train()
        try:
            self._each("start")
            while self.progress.step < steps and not self.asked_to_stop():
                result = self.train_step()
                for callback in self.callbacks:
                    callback.step(self, result)
                for callback in self.callbacks:
                    callback.after(self, result)
                self._check(result)
            self._each("end")
            return self.progress.step >= steps and self._each("complete")
        finally:
            for callback in reversed(self.callbacks):
                callback.close(self)

    def train_step(self) -> StepResult:
        """Forward, backward and optimizer for the stream's next global batch."""
        began = time.perf_counter()
        batch = next(self.stream)
        denominators = self.objective.denominators(batch.micro_batches)
        self.model.zero_grad()
        shares = run_step(
            self.model,
            batch.micro_batches,
            lambda stage, micro: self.objective.forward(stage, micro, batch.tokens),
            lambda micro, losses: self.objective.share(losses, denominators, micro),
        )
        self._each("gradients")
        losses = self.objective.total(shares)
        finite, yardstick = all(map(math.isfinite, losses)), self.objective.yardstick(losses)
        report = self.optimizer.step(finite=finite, loss=yardstick, idle=batch.idle)
        seconds = time.perf_counter() - began
        done = self.progress
        done.step += 1
        done.tokens += batch.tokens
        done.train_seconds += seconds
        if report.idle is None:  # which tells nothing of the model's health
            done.skipped_in_a_row = done.skipped_in_a_row + 1 if report.skipped else 0
        rows = sum(micro.tokens.shape[0] for micro in batch.micro_batches) * self.objective.world.data_size
        return StepResult(done.step, losses, batch.tokens, rows, seconds, report)

    def _check(self, result: StepResult) -> None:
        if self.progress.skipped_in_a_row < self.optimizer.cfg.guard.max_skipped:
            return
        self._each("stuck")
        first = result.step - self.progress.skipped_in_a_row + 1
        raise TrainingError(
            f"steps {first} to {result.step} were all skipped (last: {result.report.reason}; loss {result.losses[0]}, gradient "
            f"norm {result.report.grad_norm}); none of them changed the parameters. Lower optim.lr or optim.grad_clip, look for "
            f"the data of these steps, or where spikes are what you expect give optim.guard.enabled=false"
        )

    def _each(self, moment: str) -> bool:
        """Calls every callback, or as many as there is time for once `complete` is asked to stop; returns whether all ran."""
        for callback in self.callbacks:
            if moment == "complete" and self.asked_to_stop():
                return False
            getattr(callback, moment)(self)
        return True
