"""Decides whether a step is taken: not with a loss or gradient norm that is not finite, nor with one that spikes.

The yardstick is the median of the last accepted steps and the spread around it (1.4826 times the median absolute deviation, the
standard deviation of normal values): unlike a mean, neither moves for a few outliers. A spike lies more than
`optim.guard.deviations` of that above the median and exceeds the median itself by the factor set for its quantity. The second
rule keeps a calm stretch, whose spread is tiny, from making a spike of any ripple. Values fall as training begins, and lie below
the median of the steps before: that skips nothing. A level that is reached in one jump and stays is refused until
`optim.guard.max_skipped` steps in a row end the run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from optim.config import GuardConfig

NORMAL = 1.4826  # standard deviations of normal values in one median absolute deviation


class Guard:
    """The record of the accepted steps. Its tensors live on the CPU and go into checkpoints: a resumed run decides alike.

    The record is kept with `cfg.enabled=False`, too, when only values that are not finite skip a step.
    """

    def __init__(self, cfg: GuardConfig):
        self.cfg = cfg
        # by accepted step, modulo the window; -inf where there was none
        self.losses = torch.full((cfg.window,), -torch.inf, dtype=torch.float64)
        self.norms = torch.full((cfg.window,), -torch.inf, dtype=torch.float64)
        self.accepted = torch.zeros((), dtype=torch.int64)

    def objection(self, *, finite: bool, loss: float | None, norm: float) -> str | None:
        """Why the step must be skipped, or None. All ranks must give the same numbers: they decide without asking each other.

        finite: whether every loss of the step is; loss: nats, None where the caller has none; norm: of the whole gradient.
        """
        if not finite or not (loss is None or math.isfinite(loss)):
            return "the loss is not finite"
        if not math.isfinite(norm):
            return "the gradient norm is not finite"
        if not self.cfg.enabled:
            return None
        return self._spike("gradient norm", norm, self.norms, self.cfg.grad_norm) or (
            None if loss is None else self._spike("loss", loss, self.losses, self.cfg.loss)
        )

    def accept(self, *, loss: float | None, norm: float) -> None:
        """Records a step that is taken."""
        place = int(self.accepted) % self.cfg.window
        self.norms[place] = norm
        self.losses[place] = -math.inf if loss is None else loss
        self.accepted += 1

    def _spike(self, what: str, value: float, record: Tensor, factor: float) -> str | None:
        values = record[record.isfinite()].tolist()
        if len(values) < self.cfg.min_steps:
            return None
        middle, spread = _median_and_spread(values)
        limit = middle + max(self.cfg.deviations * spread, (factor - 1) * abs(middle))
        if not value > limit > middle:  # zeros alone are no yardstick
            return None
        if middle > 0:
            above, most = f"{value / middle:.3g} times the", limit / middle
        else:
            above, most = f"{value - middle:.3g} above the", limit - middle
        return f"spike of the {what}, {above} median of the last {len(values)} (limit {most:.3g})"

    def tensors(self) -> dict[str, Tensor]:
        """What a resume needs, live."""
        return {"guard.losses": self.losses, "guard.norms": self.norms, "guard.accepted": self.accepted}


def _median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    middle = statistics.median(values)
    return middle, NORMAL * statistics.median(abs(value - middle) for value in values)
