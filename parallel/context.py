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


class StateLink:
    """The recurrent state's way through the context ranks, one object a run of the operator (a `kernels.kda.Link`).

    Forward, one all-gather of every rank's [M | N]; the maps S -> M S + N of the earlier ranks are folded from zero. Backward,
    one all-gather of the states' gradients, folded from the last rank with M transposed. Neither depends on the length.
    """

    def __init__(self, world: World):
        self.group = world.groups.cp
        self.transitions: Tensor | None = None

    def incoming(self, fragment: Tensor) -> Tensor:
        """[..., K, K + V] -> [..., K, V]."""
        keys = fragment.shape[-2]
        every = _gather(fragment, self.group)
        state = torch.zeros_like(fragment[..., keys:], memory_format=torch.contiguous_format)
        for earlier in every[: self.group.rank()]:
            state = earlier[..., :keys] @ state + earlier[..., keys:]
        self.transitions = every[self.group.rank() + 1 :, ..., :keys].clone()  # of the later ranks
        return state

    def gradient(self, d_incoming: Tensor) -> Tensor:
        """[..., K, V] -> [..., K, V]."""
        assert self.transitions is not None
        later = _gather(d_incoming, self.group)[self.group.rank() + 1 :]
        d_state = torch.zeros_like(d_incoming, memory_format=torch.contiguous_format)
        for wanted, transition in zip(reversed(later), reversed(self.transitions)):
            d_state = wanted + transition.mT @ d_state
        return d_state


def _gather(x: Tensor, group: Any) -> Tensor:
    """[...] -> [ranks, ...]."""
    x = x.contiguous()
    out = x.new_empty(group.size(), *x.shape)
    dist.all_gather_into_tensor(out.view(-1), x.view(-1), group=group)
    return out


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
    for work in dist.batch_isend_irecv(calls) if calls else ():
        work.wait()
    return out
