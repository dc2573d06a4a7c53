"""Residual mixing by cache-sized blocks of tokens, with its gradients written out.

Each row is read from memory once forward and once backward; the rows are kept by reference, beside three numbers a token and
row. Legend: n rows, N tokens, d width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.precision import math_dtype

CPU_ELEMENTS = 1 << 20  # of all rows of one block together; smaller blocks lose more to calls than they gain in cache


def order_of(row: Tensor) -> list[int]:
    """The leading axes of `row` from the slowest to the fastest in memory: flattening in this order copies nothing."""
    strides = row.stride()
    return sorted(range(row.dim() - 1), key=lambda axis: (-strides[axis], axis))


def inverse_order(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def flatten(x: Tensor, order: list[int]) -> Tensor:
    """[..., d] -> [N, d], tokens in the given order of the leading axes; a view where memory lies so."""
    return x.permute(*order, x.dim() - 1).reshape(-1, x.shape[-1])


def empty_like(x: Tensor, order: list[int]) -> tuple[Tensor, Tensor]:
    """An empty tensor with x's shape and the given memory order, and its flat view."""
    flat = torch.empty([x.shape[axis] for axis in order] + [x.shape[-1]], dtype=x.dtype, device=x.device)
    return flat.permute(*inverse_order(order), x.dim() - 1), flat.view(-1, x.shape[-1])


def blocks(rows: Sequence[Tensor]) -> Iterator[slice]:
    tokens, width = rows[0].shape
    size = tokens if rows[0].is_cuda else CPU_ELEMENTS * torch.get_num_threads() // max(1, width * len(rows))
    size = max(1, size)
    for start in range(0, tokens, size):
        yield slice(start, start + size)


@dataclass
class Scores:
    """Three numbers a token and row, [n, N] each: <row, key>, 1 / RMS(row), and the softmax of their products over the rows."""

    dots: Tensor
    inverse: Tensor
    weights: Tensor

    @classmethod
    def empty(cls, rows: int, tokens: int, dtype: torch.dtype, device: torch.device) -> Scores:
        return cls(*(torch.empty(rows, tokens, dtype=dtype, device=device) for _ in range(3)))

    def __getitem__(self, block: slice) -> Scores:
        return Scores(self.dots[:, block], self.inverse[:, block], self.weights[:, block])

    def fill(self, rows: Sequence[Tensor], key: Tensor, eps: float) -> None:
        for i, row in enumerate(rows):
            torch.mv(row, key, out=self.dots[i])
            torch.linalg.vector_norm(row, dim=-1, out=self.inverse[i])
        self.inverse.square_().div_(len(key)).add_(eps).rsqrt_()
        self.weights.copy_(torch.softmax(self.dots * self.inverse, 0))

    def mixed(self, rows: Sequence[Tensor]) -> Tensor:
        """sum_i weights_i row_i, [N, d]."""
        weights_nN1 = self.weights.unsqueeze(-1)
        total = rows[0] * weights_nN1[0]
        for i, row in enumerate(rows[1:], 1):
            total.addcmul_(row, weights_nN1[i])
        return total

    def backward(self, rows: Sequence[Tensor], d: Tensor, key: Tensor, d_key: Tensor, d_rows: Sequence[Tensor | None]) -> None:
        """From the gradient d [N, d] of the mix: adds to d_key [d], fills those of d_rows ([N, d], any dtype) that are wanted."""
        width = d.shape[1]
        d_weights, product = torch.empty_like(self.weights), torch.empty_like(d)
        for i, row in enumerate(rows):
            torch.sum(torch.mul(row, d, out=product), -1, out=d_weights[i])
        d_scores = self.weights * (d_weights - (self.weights * d_weights).sum(0))
        # score = dot * inverse: along the key by `along`, and against the row's own length by `shrink`
        along = d_scores * self.inverse
        shrink = (along * self.dots).mul_(self.inverse).mul_(self.inverse).div_(-width)
        key_1d, columns = key.unsqueeze(0), (t.unsqueeze(-1).unbind(0) for t in (shrink, self.weights, along))
        for row, target, shrink_N1, weight_N1, along_N1 in zip(rows, d_rows, *columns):
            d_key.addmv_(row.t(), along_N1.squeeze(1))
            if target is None:
                continue
            total = target if target.dtype == d.dtype else product
            torch.mul(row, shrink_N1, out=total).addcmul_(d, weight_N1).addmm_(along_N1, key_1d)
            if total is not target:
                target.copy_(total)

    def shaped(self, like: Tensor, order: list[int]) -> Tensor:
        """weights as [n, ...] over the leading axes of a row, detached."""
        shaped = self.weights.view(len(self.weights), *[like.shape[axis] for axis in order])
        return shaped.permute(0, *[1 + axis for axis in inverse_order(order)])


def query_key(norm_weight: Tensor, query: Tensor, math: torch.dtype) -> Tensor:
    """[d]: what normalised rows are multiplied with."""
    return norm_weight.to(math) * query.reshape(-1).to(math)


def query_gradients(d_key: Tensor, norm_weight: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    d_norm = (d_key * query.reshape(-1).to(d_key.dtype)).to(norm_weight.dtype)
    return d_norm, (d_key * norm_weight.to(d_key.dtype)).to(query.dtype).view(query.shape)


class Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, norm_weight: Tensor, query: Tensor, eps: float, *rows: Tensor) -> tuple[Tensor, Tensor]:
        math = math_dtype(*rows, norm_weight, query)
        order = order_of(rows[0])
        flat = [flatten(row, order) for row in rows]
        key = query_key(norm_weight, query, math)
        scores = Scores.empty(len(rows), len(flat[0]), math, key.device)
        out, out_Nd = empty_like(rows[0], order)
        for block in blocks(flat):
            here = [row[block].to(math) for row in flat]
            scores[block].fill(here, key, eps)
            out_Nd[block] = scores[block].mixed(here)
        ctx.save_for_backward(norm_weight, query, scores.dots, scores.inverse, scores.weights, *rows)
        ctx.order = order
        weights = scores.shaped(rows[0], order)
        ctx.mark_non_differentiable(weights)
        return out, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        norm_weight, query, dots, inverse, weights, *rows = ctx.saved_tensors
        scores, math, order = Scores(dots, inverse, weights), weights.dtype, ctx.order
        flat, d_Nd = [flatten(row, order) for row in rows], flatten(d_out, order)
        key = query_key(norm_weight, query, math)
        d_key = torch.zeros_like(key)
        grads = [empty_like(row, order) if want else None for row, want in zip(rows, ctx.needs_input_grad[3:])]
        for block in blocks(flat):
            here, d = [row[block].to(math) for row in flat], d_Nd[block].to(math)
            scores[block].backward(here, d, key, d_key, [grad and grad[1][block] for grad in grads])
        return *query_gradients(d_key, norm_weight, query), None, *(grad and grad[0] for grad in grads)
