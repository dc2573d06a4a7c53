"""The global gradient norm, in the model's own precision, and what it does to the step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def squared_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The square of the 2-norm of all gradients together, a float64 scalar: parts of a model can be added up.

    Each tensor's own norm is float64 if any tensor is, else accumulated in float32.
    """
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    wide = torch.float64 if any(g.dtype == torch.float64 for g in gradients) else torch.float32
    by_dtype: dict[torch.dtype, list[Tensor]] = {}  # a list of mixed dtypes would take the slow path
    for g in gradients:
        by_dtype.setdefault(g.dtype, []).append(g)
    norms = [n for same in by_dtype.values() for n in torch._foreach_norm(same, 2, dtype=wide)]
    return torch.stack(norms).double().square().sum()


def clip_coefficient(norm: float, limit: float) -> float:
    """What every gradient is multiplied by so that the global norm is at most `limit` (0: no clipping)."""
    if limit <= 0 or not math.isfinite(norm) or norm <= limit:
        return 1.0
    return limit / norm
