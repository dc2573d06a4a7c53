"""Context parallelism: each rank holds one contiguous stretch of every row, in the order of the ranks.

Collectives with their exact backward passes. Nothing here knows what the tensors mean.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.megatron import gather_from_sequence_parallel_region
from parallel.world import World


def stretch(x: Tensor, world: World, dim: int = 1) -> Tensor:
    """This rank's contiguous part of whole rows along `dim`."""
    group = world.groups.cp
    return x if group.size() == 1 else x.chunk(group.size(), dim)[group.rank()]


def gather_past(x: Tensor, world: World) -> Tensor:
    """[T, ...] -> [(rank + 1) T, ...]: all tokens up to the end of this rank's; gradients return summed to their owners."""
    group = world.groups.cp
    if group.size() == 1:
        return x
    return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=group)[: (group.rank() + 1) * len(x)]


def from_previous(x: Tensor, world: World) -> Tensor:
    """What the previous rank gave as `x`, of the same shape; zeros on the first rank."""
    return _Shift.apply(x, world.groups.cp)


def incoming_state(fragment: Tensor, world: World) -> Tensor:
    """Folds the stretches of all earlier ranks, each acting on a state as S -> M S + N, beginning from zero.

    fragment [..., K, K + V] is this rank's [M | N]; returns [..., K, V], the state before its first token. One all-gather of the
    fragments, whose size does not depend on the sequence length, and one reduce-scatter of their gradients.
    """
    return _Fold.apply(fragment, world.groups.cp)


class _Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _shift(x, group, 1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return _shift(grad_outputs[0], ctx.group, -1), None


def _shift(x: Tensor, group: Any, step: int) -> Tensor:
    """Sends to rank + step, receives from rank - step; zeros where nobody sends."""
    rank, size = group.rank(), group.size()
    x, out = x.contiguous(), torch.zeros_like(x, memory_format=torch.contiguous_format)
    calls = []
    if 0 <= rank + step < size:
        calls.append(dist.P2POp(dist.isend, x, group=group, group_peer=rank + step))
    if 0 <= rank - step < size:
        calls.append(dist.P2POp(dist.irecv, out, group=group, group_peer=rank - step))
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return out


class _Fold(torch.autograd.Function):
    # One function, so that its backward collective runs on every rank, also on the first, whose state depends on nothing.
    @staticmethod
    def forward(ctx: Any, fragment: Tensor, group: Any) -> Tensor:
        fragment = fragment.contiguous()
        all_fragments = fragment.new_empty(group.size(), *fragment.shape)
        dist.all_gather_into_tensor(all_fragments.view(-1), fragment.view(-1), group=group)
        keys = fragment.shape[-2]
        state = torch.zeros_like(fragment[..., keys:], memory_format=torch.contiguous_format)
        before = []
        for earlier in all_fragments[: group.rank()]:
            before.append(state)
            state = earlier[..., :keys] @ state + earlier[..., keys:]
        ctx.group = group
        ctx.save_for_backward(all_fragments[: group.rank(), ..., :keys].clone(), *before)
        return state

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (d_state,) = grad_outputs
        transitions, *before = ctx.saved_tensors
        group, keys = ctx.group, d_state.shape[-2]
        d_all = d_state.new_zeros(group.size(), *d_state.shape[:-1], keys + d_state.shape[-1])
        for rank in reversed(range(group.rank())):
            d_all[rank, ..., keys:] = d_state
            d_all[rank, ..., :keys] = d_state @ before[rank].mT
            d_state = transitions[rank].mT @ d_state
        out = torch.empty_like(d_all[0])
        dist.reduce_scatter_tensor(out.view(-1), d_all.view(-1), group=group)
        return out, None
