"""Which part of every parameter this rank updates (ZeRO-1 and 2), read from megatron-core's buffers.

Under ZeRO each bucket of a buffer is cut evenly over the ranks that replicate it: data and context ranks for dense parameters,
expert-data ranks for experts. A rank holds the reduced gradient, the master weight and the moments of its cut alone; `sync`
gathers the updated weights. Without ZeRO, or without replicas, every part is the whole parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.boxes import Box, Place, place
from parallel.cards import Card, CardTable, Group, TensorAxis
from parallel.world import World


@dataclass(frozen=True)
class Shard:
    """This rank's part of one parameter: elements [start, stop) of the flattened tensor."""

    parameter: nn.Parameter
    parts: tuple[tuple[int, int], ...]  # [start, stop) by rank of `group`: disjoint, together the whole parameter
    rank: int  # in `group`
    group: Any  # the process group the parameter is cut over; None where it is not cut
    counted: bool  # this rank counts the part in sums over the model, and no other rank counts it too
    bucket: int = 0  # of megatron-core's buckets on this rank, all stages together: what lies in one is cut together
    reduced: Tensor | None = None  # under ZeRO-2, where the part's gradient lies, maybe in CPU memory; shaped like `weight`
    place: Place | None = None  # where the parameter lies in the whole one; None: it is the whole one

    @property
    def start(self) -> int:
        return self.parts[self.rank][0]

    @property
    def stop(self) -> int:
        return self.parts[self.rank][1]

    @property
    def whole(self) -> bool:
        return self.stop - self.start == self.parameter.numel()

    def of(self, tensor: Tensor) -> Tensor:
        """The part of a tensor shaped like the parameter: the tensor itself where whole, else a flat view [stop - start]."""
        return tensor if self.whole else tensor.view(-1)[self.start : self.stop]

    @property
    def leads(self) -> bool:
        """Whether, of all ranks, this one holds the whole parameter's first element and writes it."""
        return self.start == 0 and (self.place is None or (self.place.replica == 0 and not any(self.place.offset)))

    def boxes(self, name: str, tensor: Tensor) -> Iterator[Box]:
        """A tensor shaped like `weight`, in the coordinates of the whole parameter."""
        local = tuple(self.parameter.shape)
        where = self.place or Place(local, (0,) * len(local), 0)
        if self.whole:
            yield where.box(name, tensor)
        else:
            yield from where.pieces(name, tensor, self.start, local)

    @property
    def weight(self) -> Tensor:
        """A view of the parameter; looked up anew, because buffers may replace a parameter's storage."""
        return self.of(self.parameter.data)

    @property
    def gradient(self) -> Tensor | None:
        """The reduced gradient: ZeRO-2's where it holds one, else of `main_grad` where there is one, else of `grad`."""
        if self.reduced is not None:
            return self.reduced
        main: Tensor | None = getattr(self.parameter, "main_grad", None)
        gradient = self.parameter.grad if main is None else main
        return None if gradient is None else self.of(gradient)


class Shards(Mapping[str, Shard]):
    """The parts of all trained parameters by name, in the model's order; an empty part has start == stop."""

    def __init__(self, shards: Mapping[str, Shard], world: World | None = None, buffers: Sequence[Any] = ()):
        self._shards = dict(shards)
        self.world = world
        self._buffers = buffers  # megatron-core's DistributedDataParallel of each stage: the weights may lie in gathered buffers

    @classmethod
    def whole(cls, cards: CardTable) -> Shards:
        """Every parameter whole, in a single process."""
        return cls({card.name: Shard(p, ((0, p.numel()),), 0, None, True) for card, p in cards.trained()})

    @classmethod
    def of(cls, buffers: Sequence[Any], cards: CardTable, world: World) -> Shards:
        """The cut that megatron-core's DistributedDataParallel makes of each stage."""
        ranges = {p: parts for of in buffers if of.ddp_config.use_distributed_optimizer for p, parts in cut(of).items()}
        buckets = _buckets(buffers)
        reduced = {p: gradient for of in buffers for p, gradient in getattr(of, "reduced", {}).items()}
        shards = {}
        for card, p in cards.trained():
            group = world.groups.expt_dp if card.placement.group is Group.EXPERT else world.groups.dp_cp
            first, where = _first_of_replicas(card, world), place(card, p, world)
            if (parts := ranges.get(p)) is not None and group.size() > 1:
                where = replace(where, replica=0 if first else 1)
                shards[card.name] = Shard(p, parts, group.rank(), group, first, buckets[p], reduced.get(p), where)
            else:
                counted = first and group.rank() == 0
                shards[card.name] = Shard(p, ((0, p.numel()),), 0, None, counted, reduced=reduced.get(p), place=where)
        return cls(shards, world, buffers)

    def __getitem__(self, name: str) -> Shard:
        return self._shards[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)

    @property
    def device(self) -> torch.device:
        """Of the weights, and of what ranks exchange."""
        if self.world is not None:
            return self.world.device
        return next(iter(self._shards.values())).parameter.device

    @property
    def tensor_size(self) -> int:
        return 1 if self.world is None else self.world.groups.tp.size()

    @property
    def tensor_rank(self) -> int:
        return 0 if self.world is None else self.world.groups.tp.rank()

    @property
    def expert_place(self) -> tuple[int, int]:
        """(how many ranks hold other experts, this one's number)"""
        return (1, 0) if self.world is None else (self.world.groups.ep.size(), self.world.groups.ep.rank())

    @property
    def pipeline_size(self) -> int:
        return 1 if self.world is None else self.world.groups.pp.size()

    def over_tensor_ranks(self, values: Tensor) -> Tensor:
        """The values of every tensor rank, [tensor ranks, *shape]."""
        return values.unsqueeze(0) if self.world is None else _over(self.world.groups.tp, values)

    def over_pipeline_ranks(self, values: Tensor) -> Tensor:
        """The values of every pipeline rank, [pipeline ranks, *shape]."""
        return values.unsqueeze(0) if self.world is None else _over(self.world.groups.pp, values)

    def sum(self, values: Tensor) -> Tensor:
        """Sums over all ranks of the model and its replicas; what each rank gives must cover `counted` parts only. In place."""
        if self.world is not None and self.world.size > 1:
            dist.all_reduce(values)
        return values

    def range(self, value: int | None) -> tuple[int, int]:
        """The least and the largest of the values that ranks of the model and its replicas give; (0, 0) where none gives one."""
        if self.world is None or self.world.size == 1:
            return (value or 0,) * 2
        none = -torch.iinfo(torch.int64).max
        ends = torch.tensor([none, none] if value is None else [-value, value], device=self.device)
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        lowest, highest = ends.tolist()
        return (0, 0) if highest == none else (-lowest, highest)

    def over_data_ranks(self, values: Tensor) -> Tensor:
        """The values of every data and context rank, [ranks, *shape]."""
        return values.unsqueeze(0) if self.world is None else _over(self.world.groups.dp_cp, values)

    def max_over_data(self, values: Tensor) -> Tensor:
        """The maximum over the ranks that hold different tokens of the same heads. In place."""
        if self.world is not None and self.world.groups.dp_cp.size() > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.world.groups.dp_cp)
        return values

    @torch.no_grad()
    def sync(self) -> None:
        """Gathers the updated parts into whole weights on every rank; nothing to do without ZeRO."""
        for buffers in self._buffers:
            if buffers.ddp_config.use_distributed_optimizer:
                buffers.start_param_sync(force_sync=True)


def _over(group: Any, values: Tensor) -> Tensor:
    if group.size() == 1:
        return values.unsqueeze(0)
    out = values.new_empty(group.size(), *values.shape)
    dist.all_gather_into_tensor(out.view(-1), values.reshape(-1), group=group)
    return out


def _first_of_replicas(card: Card, world: World) -> bool:
    """Whether this rank counts the parameter: each shard counts, of equal copies the first alone."""
    if card.placement.both_ends and world.groups.pp.rank() > 0:
        return False
    if card.placement.group is Group.EXPERT or card.placement.tensor in (TensorAxis.ROWS, TensorAxis.COLS):
        return True
    return world.groups.tp.rank() == 0


def _buckets(buffers: Sequence[Any]) -> dict[nn.Parameter, int]:
    """The number of each parameter's bucket, the same on all ranks that replicate it."""
    every = [bucket for of in buffers for buffer in (*of.buffers, *of.expert_parallel_buffers) for bucket in buffer.buckets]
    return {parameter: number for number, bucket in enumerate(every) for parameter in bucket.param_to_index}


def cut(buffers: Any) -> dict[nn.Parameter, tuple[tuple[int, int], ...]]:
    """[start, stop) of every rank, by parameter: each bucket is cut evenly, wherever the edges fall."""
    out = {}
    for buffer in (*buffers.buffers, *buffers.expert_parallel_buffers):
        ranks = buffer.data_parallel_world_size
        for bucket in buffer.buckets:
            size = bucket.grad_data.numel() // ranks
            for parameter, (first, last) in bucket.param_to_index.items():
                edges = [min(max(r * size, first), last) - first for r in range(ranks + 1)]
                out[parameter] = tuple(pairwise(edges))
    return out
