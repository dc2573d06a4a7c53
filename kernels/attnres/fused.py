"""Residual mixing by cache-sized blocks of tokens, with its gradients written out.

Each row is read from memory once forward and once backward; the rows are kept by reference, beside three numbers a token and
row. Legend: n rows, N tokens, d width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.precision import math_dtype

CPU_ELEMENTS = 1 << 20  # of all rows of one block together; smaller blocks lose more to calls than they gain in cache


def _order(row: Tensor) -> list[int]:
    """The leading axes of `row` from the slowest to the fastest in memory: flattening in this order copies nothing."""
    strides = row.stride()
    return sorted(range(row.dim() - 1), key=lambda axis: (-strides[axis], axis))


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _flat(x: Tensor, order: list[int]) -> Tensor:
    """[..., d] -> [N, d], tokens in the given order of the leading axes; a view where memory lies so."""
    return x.permute(*order, x.dim() - 1).reshape(-1, x.shape[-1])


def _like(x: Tensor, order: list[int]) -> tuple[Tensor, Tensor]:
    """An empty tensor with x's shape and the given memory order, and its flat view."""
    flat = torch.empty([x.shape[axis] for axis in order] + [x.shape[-1]], dtype=x.dtype, device=x.device)
    return flat.permute(*_inverse(order), x.dim() - 1), flat.view(-1, x.shape[-1])


def _blocks(rows: Sequence[Tensor]) -> Iterator[slice]:
    tokens, width = rows[0].shape
    size = tokens if rows[0].is_cuda else CPU_ELEMENTS * torch.get_num_threads() // max(1, width * len(rows))
    size = max(1, size)
    for start in range(0, tokens, size):
        yield slice(start, start + size)


class Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, norm_weight: Tensor, query: Tensor, eps: float, *rows: Tensor) -> tuple[Tensor, Tensor]:
        math = math_dtype(*rows, norm_weight, query)
        order = _order(rows[0])
        flat = [_flat(row, order) for row in rows]
        tokens, width = flat[0].shape
        key = norm_weight.to(math) * query.reshape(-1).to(math)
        dots, inverse, weights = (torch.empty(len(rows), tokens, dtype=math, device=key.device) for _ in range(3))
        out, out_Nd = _like(rows[0], order)
        for block in _blocks(flat):
            here = [row[block].to(math) for row in flat]
            dots_nN, inverse_nN = dots[:, block], inverse[:, block]
            for i, row in enumerate(here):
                torch.mv(row, key, out=dots_nN[i])
                torch.linalg.vector_norm(row, dim=-1, out=inverse_nN[i])
            inverse_nN.square_().div_(width).add_(eps).rsqrt_()
            weights[:, block] = torch.softmax(dots_nN * inverse_nN, 0)
            weights_nN1 = weights[:, block].unsqueeze(-1)
            total = here[0] * weights_nN1[0]
            for i, row in enumerate(here[1:], 1):
                total.addcmul_(row, weights_nN1[i])
            out_Nd[block] = total
        ctx.save_for_backward(norm_weight, query, dots, inverse, weights, *rows)
        ctx.order = order
        shaped = weights.view(len(rows), *[rows[0].shape[axis] for axis in order])
        shaped = shaped.permute(0, *[1 + axis for axis in _inverse(order)])
        ctx.mark_non_differentiable(shaped)
        return out, shaped

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        norm_weight, query, dots, inverse, weights, *rows = ctx.saved_tensors
        math, order = weights.dtype, ctx.order
        flat, d_Nd = [_flat(row, order) for row in rows], _flat(d_out, order)
        width = d_Nd.shape[1]
        key = norm_weight.to(math) * query.reshape(-1).to(math)
        d_key = torch.zeros_like(key)
        wanted = ctx.needs_input_grad[3:]
        grads = [_like(row, order) if want else None for row, want in zip(rows, wanted)]
        for block in _blocks(flat):
            here, d = [row[block].to(math) for row in flat], d_Nd[block].to(math)
            weights_nN, inverse_nN, dots_nN = weights[:, block], inverse[:, block], dots[:, block]
            d_weights, product = torch.empty_like(weights_nN), torch.empty_like(d)
            for i, row in enumerate(here):
                torch.sum(torch.mul(row, d, out=product), -1, out=d_weights[i])
            d_scores = weights_nN * (d_weights - (weights_nN * d_weights).sum(0))
            # score = dot * inverse: along the key by `along`, and against the row's own length by `shrink`
            along = d_scores * inverse_nN
            shrink = (along * dots_nN).mul_(inverse_nN).mul_(inverse_nN).div_(-width)
            key_1d, columns = key.unsqueeze(0), (t.unsqueeze(-1).unbind(0) for t in (shrink, weights_nN, along))
            for row, grad, shrink_N1, weight_N1, along_N1 in zip(here, grads, *columns):
                d_key.addmv_(row.t(), along_N1.squeeze(1))
                if grad is None:
                    continue
                target = grad[1][block]
                total = target if target.dtype == math else product
                torch.mul(row, shrink_N1, out=total).addcmul_(d, weight_N1).addmm_(along_N1, key_1d)
                if total is not target:
                    target.copy_(total)
        d_norm = (d_key * query.reshape(-1).to(math)).to(norm_weight.dtype)
        d_query = (d_key * norm_weight.to(math)).to(query.dtype).view(query.shape)
        return d_norm, d_query, None, *(None if grad is None else grad[0] for grad in grads)
