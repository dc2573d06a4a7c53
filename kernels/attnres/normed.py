"""Residual mixing and the RMSNorm behind it as one operator that mixes again in the backward pass instead of saving the mix.

Beside the rows, kept by reference, it saves three numbers a token and row and one a token. Legend: n rows, N tokens, d width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.attnres.fused import Scores, blocks, empty_like, flatten, order_of, query_gradients, query_key
from kernels.norm import inverse_rms, norm_backward
from kernels.precision import math_dtype


class MixNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, norm_weight: Tensor, query: Tensor, out_weight: Tensor, eps: float, *rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        math = math_dtype(*rows, norm_weight, query)
        order = order_of(rows[0])
        flat = [flatten(row, order) for row in rows]
        key, out_weight_m = query_key(norm_weight, query, math), out_weight.to(math)
        scores = Scores.empty(len(rows), len(flat[0]), math, key.device)
        scale_N1 = torch.empty(len(flat[0]), 1, dtype=math, device=key.device)
        out, out_Nd = empty_like(rows[0], order)
        for block in blocks(flat):
            here = [row[block].to(math) for row in flat]
            scores[block].fill(here, key, eps)
            mixed = _rounded(scores[block].mixed(here), rows[0].dtype)
            scale_N1[block] = inverse_rms(mixed, eps)
            out_Nd[block] = mixed.mul_(scale_N1[block]).mul_(out_weight_m)
        ctx.save_for_backward(norm_weight, query, out_weight, scores.dots, scores.inverse, scores.weights, scale_N1, *rows)
        ctx.order = order
        weights = scores.shaped(rows[0], order)
        ctx.mark_non_differentiable(weights)
        return out, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        norm_weight, query, out_weight, dots, inverse, weights, scale_N1, *rows = ctx.saved_tensors
        scores, math, order = Scores(dots, inverse, weights), weights.dtype, ctx.order
        flat, d_Nd = [flatten(row, order) for row in rows], flatten(d_out, order)
        key, out_weight_m = query_key(norm_weight, query, math), out_weight.to(math)
        d_key, d_weight = torch.zeros_like(key), torch.zeros_like(key)
        grads = [empty_like(row, order) if want else None for row, want in zip(rows, ctx.needs_input_grad[4:])]
        for block in blocks(flat):
            here, scale = [row[block].to(math) for row in flat], scale_N1[block]
            normal = _rounded(scores[block].mixed(here), rows[0].dtype).mul_(scale)
            d_mixed, d_weight_here = norm_backward(d_Nd[block].to(math, copy=True), normal, scale, out_weight_m)
            d_weight += d_weight_here
            scores[block].backward(here, d_mixed, key, d_key, [grad and grad[1][block] for grad in grads])
        d_rows = (grad and grad[0] for grad in grads)
        return *query_gradients(d_key, norm_weight, query), d_weight.to(out_weight.dtype), None, *d_rows


def _rounded(mixed: Tensor, dtype: torch.dtype) -> Tensor:
    """The mix is a hidden state: its norm reads it in the rows' dtype, whether or not it is stored."""
    return mixed if mixed.dtype == dtype else mixed.to(dtype).to(mixed.dtype)
