"""Residual mixing on stacked rows in plain autograd: the reading that the fast paths must agree with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.norm.reference import rms_norm
from kernels.precision import math_dtype


def mix(rows: Sequence[Tensor], norm_weight: Tensor, query: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    math = math_dtype(*rows, norm_weight, query)
    stack = torch.stack([row.to(math) for row in rows])
    normed = stack * (stack.square().mean(-1, keepdim=True) + eps).rsqrt()
    scores = (normed * (norm_weight.to(math) * query.reshape(-1).to(math))).sum(-1)
    weights = scores.softmax(0)
    return (weights.unsqueeze(-1) * stack).sum(0).to(rows[0].dtype), weights.detach()


def mix_norm(
    rows: Sequence[Tensor], norm_weight: Tensor, query: Tensor, out_weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    mixed, weights = mix(rows, norm_weight, query, eps=eps)
    return rms_norm(mixed, out_weight, eps=eps), weights
