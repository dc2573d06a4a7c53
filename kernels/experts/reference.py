"""A grouped linear map, one expert after another: the reading that the grouped paths must agree with."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x [N, in] sorted by expert, weight [E, out, in], counts [E] -> [N, out]."""
    pieces = x.split(counts.tolist())
    return torch.cat([piece @ weight[e].t() for e, piece in enumerate(pieces)])
