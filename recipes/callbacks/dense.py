"""The equal-time yardstick: a plain dense transformer on the same data and recipe, at the same moment of its schedule."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from data.batch import Batch
from recipes.callbacks.progress import ProgressBar
from recipes.console import say
from recipes.objective import heldout_loss
from recipes.run_folder import read_metrics
from recipes.trainer import Callback, Trainer

WARM_UP, MEASURED = 2, 5  # steps of a throw-away model that tell how many steps fit into the time


class DenseComparison(Callback):
    """Leaves `results["dense"]`: both models after the same seconds of training, at the same share of their schedules.

    The dense model gets a schedule of as many steps as fit into K3's whole training time, and trains the share of them that
    `step` is of K3's: both stand at the same learning rate then. K3's side is its held-out loss at `step`, from the metrics
    file. `build(steps)` makes a trainer of the dense model with a schedule of that many steps. Evaluation and saving count on
    neither side.
    """

    def __init__(self, build: Callable[[int], Trainer], heldout: Sequence[Batch], metrics: Path, step: int):
        self.build = build
        self.heldout = heldout
        self.metrics = metrics
        self.at = step

    def complete(self, trainer: Trainer) -> None:
        (k3,) = (record for record in read_metrics(self.metrics) if record["step"] == self.at)
        whole = max(1, math.floor(trainer.progress.train_seconds / self._step_seconds()))
        steps = max(1, round(whole * self.at / trainer.steps))
        say(f"dense transformer: {steps} of {whole} steps, the time K3 took for {self.at} of {trainer.steps}")
        dense = self.build(whole)
        dense.callbacks.append(ProgressBar())
        dense.asked_to_stop = trainer.asked_to_stop
        if not dense.run(steps):
            return
        trainer.results["dense"] = {
            "parameters": sum(p.numel() for p in dense.module.parameters()),
            "share_of_schedule": self.at / trainer.steps,
            "steps": steps,
            "tokens": dense.progress.tokens,
            "train_seconds": dense.progress.train_seconds,
            "heldout_loss": heldout_loss(dense.model, self.heldout),
            "k3_tokens": k3["tokens"],
            "k3_train_seconds": k3["train_seconds"],
            "k3_heldout_loss": k3["heldout_loss"],
        }

    def _step_seconds(self) -> float:
        probe = self.build(WARM_UP + MEASURED)
        probe.module.train()
        return statistics.median([probe.train_step().seconds for _ in range(WARM_UP + MEASURED)][WARM_UP:])
