"""The equal-time yardstick: a plain dense transformer, trained for as long as K3 was, on the same data and recipe."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from data.batch import Batch
from recipes.callbacks.progress import ProgressBar
from recipes.console import say
from recipes.objective import heldout_loss
from recipes.trainer import Callback, Trainer

WARM_UP, MEASURED = 2, 5  # steps of a throw-away model that tell how many steps fit into the time


class DenseComparison(Callback):
    """Leaves `results["dense"]`: steps, tokens, train_seconds, parameters and heldout_loss of the dense model.

    `build(steps)` makes its trainer with a schedule of that many steps. The time is K3's time in training steps; evaluation and
    saving count on neither side.
    """

    def __init__(self, build: Callable[[int], Trainer], heldout: Sequence[Batch]):
        self.build = build
        self.heldout = heldout

    def complete(self, trainer: Trainer) -> None:
        budget = trainer.progress.train_seconds
        steps = max(1, math.floor(budget / self._step_seconds()))
        say(f"dense transformer, for the same {budget:.0f} s of training: {steps} steps")
        dense = self.build(steps)
        dense.callbacks.append(ProgressBar())
        dense.asked_to_stop = trainer.asked_to_stop
        if not dense.run(steps):
            return
        trainer.results["dense"] = {
            "parameters": sum(p.numel() for p in dense.module.parameters()),
            "steps": steps,
            "tokens": dense.progress.tokens,
            "train_seconds": dense.progress.train_seconds,
            "heldout_loss": heldout_loss(dense.module, self.heldout, dense.objective.world),
        }

    def _step_seconds(self) -> float:
        probe = self.build(WARM_UP + MEASURED)
        probe.module.train()
        return statistics.median([probe.train_step().seconds for _ in range(WARM_UP + MEASURED)][WARM_UP:])
