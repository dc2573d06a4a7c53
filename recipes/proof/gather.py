"""Puts together what lies on several ranks: parameters, gradients, hidden states; and compares what should be equal.

Every function is collective: all ranks call it, all get the result.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.cards import Card, CardTable, Group, Optimizer, TensorAxis
from parallel.shards import Shards
from parallel.world import World

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def join(tensor: Tensor, group: Any, dim: int) -> Tensor:
    """The tensors of a group's ranks, of equal shape, one behind the other along `dim`."""
    if group.size() == 1:
        return tensor
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, dim)


def whole(tensor: Tensor, card: Card, world: World) -> Tensor:
    """The global tensor of which this rank's parameter holds a shard."""
    if card.blocks.per_expert:
        return join(tensor, world.groups.ep, 0)
    axis = {TensorAxis.ROWS: 0, TensorAxis.COLS: 1}.get(card.placement.tensor)
    return tensor if axis is None else join(tensor, world.groups.tp, axis)


@torch.no_grad()
def gradients(cards: CardTable, shards: Shards, world: World) -> dict[str, Tensor]:
    """The reduced gradient of every trained parameter, whole. Under ZeRO only a rank's own part of it is valid."""
    out = {}
    for card, parameter in cards.trained():
        shard = shards[card.name]
        part = shard.gradient
        if part is None:
            part = torch.zeros_like(shard.weight)
        gradient = torch.zeros(parameter.shape, dtype=part.dtype, device=parameter.device)  # of collectives
        shard.of(gradient).copy_(part)
        if shard.group is not None:
            dist.all_reduce(gradient, group=shard.group)
        out[card.name] = whole(gradient, card, world).clone()
    return out


@torch.no_grad()
def weights(cards: CardTable, world: World) -> dict[str, Tensor]:
    """Every parameter and router bias, whole."""
    return {name: whole(cards.tensor(name).detach(), card, world).clone() for name, card in cards.items()}


def hidden(x: Tensor, world: World, *, over_tensor_ranks: bool) -> Tensor:
    """[local T, local B, ...] -> [T, B, ...]. Context ranks cut T, tensor ranks what those leave, data ranks B."""
    if over_tensor_ranks:
        x = join(x, world.groups.tp, 0)
    return join(join(x, world.groups.cp, 0), world.groups.dp, 1)


@torch.no_grad()
def drift(cards: CardTable, world: World) -> dict[str, list[str]]:
    """The parameters and router biases whose copies are not bitwise equal on all ranks that hold them, with the axes."""
    names = list(cards)
    groups = {"tensor": world.groups.tp, "data": world.groups.dp_cp, "expert-data": world.groups.expt_dp}
    if world.groups.pp.rank() in (0, world.groups.pp.size() - 1):
        groups["pipeline"] = world.groups.embd
    found = torch.zeros(len(groups), len(names), dtype=torch.int64)
    for i, (axis, group) in enumerate(groups.items()):
        held = [n for n, name in enumerate(names) if axis in _copied_over(cards[name])]
        if group.size() == 1 or not held:
            continue
        bits = [_bits(cards.tensor(names[n])) for n in held]
        least, most = torch.cat(bits), torch.cat(bits)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        for n, differs in zip(held, (least != most).split([len(b) for b in bits])):
            found[i, n] = differs.any()
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=world.groups.tp_dp_cp)  # a group that another rank belongs to
    axes = list(groups)
    return {names[n]: [axes[i] for i in range(len(axes)) if found[i, n]] for n in range(len(names)) if found[:, n].any()}


def _copied_over(card: Card) -> tuple[str, ...]:
    if card.optimizer is Optimizer.BALANCE:
        return "tensor", "data"
    if card.placement.group is Group.EXPERT:
        return ("expert-data",)
    ends = ("pipeline",) if card.placement.both_ends else ()
    return ("data", *ends) if card.placement.tensor in (TensorAxis.ROWS, TensorAxis.COLS) else ("tensor", "data", *ends)


def _bits(tensor: Tensor) -> Tensor:
    """The raw bits as int64: values would call 0 and -0 equal, and NaN unequal to itself."""
    return tensor.detach().contiguous().view(_BITS[tensor.element_size()]).to(torch.int64).flatten()
