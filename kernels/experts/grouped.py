"""A linear map for each expert over tokens sorted by expert, as one grouped product forward and two backward.

Three ways, fastest first: torch's grouped product (float32 and bfloat16; fastest at every load measured, max/mean 1.0 to 7); a
batch padded to the largest expert (float64, or widths that do not fill 16 bytes); a product an expert where the padding
would more than double the work. Legend: N tokens, E experts, I input width, O output width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

PADDING_LIMIT = 2.0  # padded rows over real rows
EVEN_LIMIT = 2.0  # rows of an even batch over those of the tokens and of FEW_ROWS an expert
FEW_ROWS = 16  # below, CPU products switch to code whose rounding differs

# (x [N, I], matrices [E, I, O], counts [E]) -> [N, O]; and (left [N, O], right [N, I], counts [E]) -> [E, O, I]
Rows = Callable[[Tensor, Tensor, Tensor], Tensor]
Outer = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Way:
    rows: Rows
    outer: Outer


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0).to(torch.int32)


def _library_rows(x: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    return F.grouped_mm(x.contiguous(), matrices, offs=_ends(counts))


def _library_outer(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    return F.grouped_mm(left.contiguous().t(), right.contiguous(), offs=_ends(counts))


def _slots(counts: Tensor) -> tuple[int, Tensor]:
    """Capacity of one expert, and the padded row of each token."""
    capacity = int(counts.max())
    expert = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    first = counts.cumsum(0) - counts
    return capacity, expert * capacity + torch.arange(len(expert), device=counts.device) - first[expert]


def _pad(x: Tensor, counts: Tensor, capacity: int, slots: Tensor) -> Tensor:
    padded = x.new_zeros(len(counts) * capacity, x.shape[1])
    padded[slots] = x
    return padded.view(len(counts), capacity, x.shape[1])


def _padded_rows(x: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    capacity, slots = _slots(counts)
    return torch.bmm(_pad(x, counts, capacity, slots), matrices).flatten(0, 1)[slots]


def _padded_outer(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    capacity, slots = _slots(counts)
    return torch.bmm(_pad(left, counts, capacity, slots).transpose(1, 2), _pad(right, counts, capacity, slots))


def _single_rows(x: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], matrices.shape[2])
    sizes = counts.tolist()
    for part, result, matrix in zip(x.split(sizes), out.split(sizes), matrices):
        torch.mm(part, matrix, out=result)
    return out


def _single_outer(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    out = left.new_empty(len(counts), left.shape[1], right.shape[1])
    sizes = counts.tolist()
    for a, b, result in zip(left.split(sizes), right.split(sizes), out):
        torch.mm(a.t(), b, out=result)
    return out


def _settled(way: Way, x: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """`way.rows`, with every expert's batch brought to a size at which the CPU's products treat each row alike.

    Small batches, and in float64 those that do not fill the vector registers, take other code paths: a token's result would
    depend, in its last bit, on how many tokens share its expert, later ones included.
    """
    sizes = counts.clamp(min=FEW_ROWS)
    if x.dtype == torch.float64:
        sizes = (sizes + 7) // 8 * 8
    sizes = torch.where(counts > 0, sizes, 0)
    if x.dtype == torch.bfloat16 or torch.equal(sizes, counts):
        return way.rows(x, matrices, counts)
    slots = torch.repeat_interleave((sizes.cumsum(0) - sizes) - (counts.cumsum(0) - counts), counts) + torch.arange(len(x))
    roomy = x.new_zeros(int(sizes.sum()), x.shape[1])
    roomy[slots] = x
    return way.rows(roomy, matrices, sizes)[slots]


def even(x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor] | None:
    """(x spread out, [E, C, I], as many rows for every expert; where its rows lie in [E C]), on a CPU without gradients.

    For the few tokens of generation: one batched product instead of one an expert, to the same bits (C fills sixteens, as in
    `_settled`). None where a crowded expert would make the batch too large, and in bfloat16.
    """
    experts = len(counts)
    if x.device.type != "cpu" or x.dtype == torch.bfloat16 or not len(x):
        return None
    capacity = -(-int(counts.max()) // FEW_ROWS) * FEW_ROWS
    if capacity * experts > EVEN_LIMIT * (len(x) + FEW_ROWS * experts):
        return None
    apart = torch.arange(0, capacity * experts, capacity) - (counts.cumsum(0) - counts)
    places = torch.repeat_interleave(apart, counts) + torch.arange(len(x))
    return x.new_zeros(experts * capacity, x.shape[1]).index_copy_(0, places, x).view(experts, capacity, -1), places


LIBRARY = Way(_library_rows, _library_outer)
PADDED = Way(_padded_rows, _padded_outer)
SINGLE = Way(_single_rows, _single_outer)


def library_refuses(x: Tensor, counts: Tensor, *weights: Tensor) -> str | None:
    if x.dtype not in (torch.float32, torch.bfloat16):
        return f"{x.dtype}"
    widths = {size for weight in weights for size in weight.shape[1:]}
    if any(size * x.element_size() % 16 for size in widths):
        return "a width does not fill whole 16 bytes"
    return None


def padded_refuses(x: Tensor, counts: Tensor, *weights: Tensor) -> str | None:
    padded = int(counts.max()) * len(counts) if len(counts) else 0
    return "the largest expert would more than double the work" if padded > PADDING_LIMIT * x.shape[0] else None


class GroupedLinear(torch.autograd.Function):
    """x [N, I] by expert, weight [E, O, I] -> [N, O]."""

    @staticmethod
    def forward(ctx: Any, way: Way, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.way = way
        ctx.save_for_backward(x, weight, counts)
        if not x.shape[0]:
            return x.new_zeros(0, weight.shape[1])
        matrices = weight.transpose(1, 2)
        return _settled(way, x, matrices, counts) if x.device.type == "cpu" else way.rows(x, matrices, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, counts = ctx.saved_tensors
        if not x.shape[0]:
            return None, torch.zeros_like(x), torch.zeros_like(weight), None
        d_x = ctx.way.rows(d_out, weight, counts) if ctx.needs_input_grad[1] else None
        d_weight = ctx.way.outer(d_out, x, counts) if ctx.needs_input_grad[2] else None
        return None, d_x, d_weight, None
