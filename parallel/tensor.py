"""Tokens and tensor ranks: where the whole sequence meets this rank's heads and channels.

Between column- and row-parallel layers hidden states are either equal on all tensor ranks or, under sequence parallelism, cut
along the sequence. `enter` leads into column-parallel layers, megatron-core's row-parallel layers lead out. One `enter` serves
every column-parallel layer that reads the same tensor: one collective instead of one a layer.

Shapes: T tokens of this context rank, first axis; s tensor ranks under sequence parallelism, else 1.
"""

from __future__ import annotations

from torch import Tensor

from parallel.megatron import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from parallel.world import World


def enter(x: Tensor, world: World) -> Tensor:
    """[T / s, ...] -> [T, ...]; the backward pass sums the gradients of all tensor ranks, each from its own heads or channels."""
    group = world.groups.tp
    if group.size() == 1:
        return x
    if world.sequence_parallel:
        return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=group)
    return copy_to_tensor_model_parallel_region(x, group=group)


def split_tokens(x: Tensor, world: World) -> Tensor:
    """[T / s, ...] -> [T / tensor ranks, ...]: every tensor rank works on tokens of its own, as expert dispatch needs it."""
    if world.groups.tp.size() == 1 or world.sequence_parallel:
        return x
    return scatter_to_sequence_parallel_region(x, group=world.groups.tp)


def join_tokens(x: Tensor, world: World) -> Tensor:
    """The inverse of `split_tokens`."""
    if world.groups.tp.size() == 1 or world.sequence_parallel:
        return x
    return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False, group=world.groups.tp)


def own_tokens(x: Tensor, world: World) -> Tensor:
    """[T, ...] -> [T / tensor ranks, ...] of a tensor without gradient: the tokens that `split_tokens` gives this rank."""
    group = world.groups.tp
    return x if group.size() == 1 else x.chunk(group.size())[group.rank()]
