"""The head's losses where the logits of a whole row would not fit: piece by piece, forward and backward.

Legend: T tokens of this context rank, B rows, d hidden, V vocabulary, s tensor ranks under sequence parallelism, else 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from k3.linear import RMSNorm
from kernels.precision import math_dtype
from parallel.context import stretch
from parallel.cross_entropy import cross_entropy
from parallel.megatron import gather_from_sequence_parallel_region, gather_from_tensor_model_parallel_region
from parallel.tensor import enter
from parallel.world import World


def losses_by_piece(
    norm: RMSNorm, head: nn.Module, state: Tensor, labels_TB: Tensor, mask_TB: Tensor, world: World, chunk: int
) -> Tensor:
    """state [T / s, B, d] -> losses [T, B], zero where not counted, from logits of at most `chunk` tokens at a time (one position
    of all rows at least).

    The backward pass computes each piece's logits once more, so that neither pass holds more than one piece's; of the forward
    pass it keeps the state alone. The head's gradient is summed over the pieces in float32 (float64 in a float64 model) and
    rounded once. Losses are those of whole rows, up to how a product rounds that has fewer rows.
    """
    return _Pieces.apply(state, norm.weight, head.get_parameter("weight"), norm, head, labels_TB, mask_TB, world, chunk)


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, state: Tensor, scale: Tensor, weight: Tensor, norm: RMSNorm, head: nn.Module, labels: Tensor, mask: Tensor,
        world: World, chunk: int,
    ) -> Tensor:  # fmt: skip
        hidden = enter(norm(state), world)
        group = world.groups.tp
        parts = [cross_entropy(head(hidden[at]), labels[at], mask[at], group) for at in pieces(labels, chunk)]
        ctx.save_for_backward(state, weight, labels, mask)
        ctx.norm, ctx.head, ctx.world, ctx.chunk = norm, head, world, chunk
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (d_losses,) = grad_outputs
        state, weight, labels, mask = ctx.saved_tensors
        with torch.enable_grad():
            inner = state.detach().requires_grad_()
            hidden = enter(ctx.norm(inner), ctx.world)
        read, d_hidden = hidden.detach(), torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=math_dtype(weight))
        for at in pieces(labels, ctx.chunk):
            logits = ctx.head(read[at]).detach().requires_grad_()
            with torch.enable_grad():
                losses = cross_entropy(logits, labels[at], mask[at], ctx.world.groups.tp)
            (d_logits,) = torch.autograd.grad(losses, logits, d_losses[at])
            torch.matmul(d_logits, weight, out=d_hidden[at])
            across, along = d_logits.flatten(0, 1).t(), read[at].flatten(0, 1)
            if weight.dtype == d_weight.dtype:
                d_weight.addmm_(across, along)
            else:
                d_weight += across @ along
        d_state, d_scale = torch.autograd.grad(hidden, (inner, ctx.norm.weight), d_hidden)
        return d_state, d_scale, d_weight.to(weight.dtype), *[None] * 6


def pieces(labels_TB: Tensor, chunk: int | None) -> Iterator[slice]:
    """Cuts T positions of B rows into pieces of at most `chunk` tokens, as even as they come; None: one piece."""
    positions, rows = labels_TB.shape
    most = positions if chunk is None else max(1, chunk // rows)
    count = -(-positions // most)
    for number in range(count):
        yield slice(number * positions // count, (number + 1) * positions // count)


@torch.no_grad()
def scores(norm: RMSNorm, head: nn.Module, state: Tensor, labels: Tensor, world: World, chunk: int | None) -> Tensor:
    """state [T / s, B, d], labels [B, whole rows] -> [2, B, whole rows] on every tensor and context rank, float32 or float64: the
    loss of each label, and 1 where it was the likeliest token, else 0.

    The logits of one piece at a time are gathered over tensor ranks, never those of a row.
    """
    labels_TB = stretch(labels, world).t()
    hidden, found = enter(norm(state), world), []
    for at in pieces(labels_TB, chunk):
        logits = gather_from_tensor_model_parallel_region(head(hidden[at]), group=world.groups.tp)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
        wanted = labels_TB[at].flatten()
        loss = F.cross_entropy(logits, wanted, reduction="none")
        found.append(torch.stack([loss, (logits.argmax(-1) == wanted).to(loss)], -1).unflatten(0, labels_TB[at].shape))
    out_TB2 = torch.cat(found)
    if world.groups.cp.size() > 1:
        out_TB2 = gather_from_sequence_parallel_region(out_TB2, tensor_parallel_output_grad=False, group=world.groups.cp)
    return out_TB2.permute(2, 1, 0)
