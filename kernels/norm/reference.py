"""RMSNorm as its definition reads; autograd derives the rest."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """x [..., d], weight [d]."""
    math = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = x.to(math)
    return (y / torch.sqrt(y.square().mean(-1, keepdim=True) + eps) * weight.to(math)).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """x, gate [..., d], weight [d]."""
    math = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (rms_norm(x.to(math), weight.to(math), eps=eps) * torch.sigmoid(gate.to(math))).to(gate.dtype)
