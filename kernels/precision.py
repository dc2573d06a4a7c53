"""The one rule of internal precision: float64 stays float64, everything else is computed in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def math_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype that operators compute in: float64 if any input is, else float32 (bf16 is stored, never summed)."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
