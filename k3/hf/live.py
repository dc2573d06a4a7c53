"""A model as it runs, under any parallel layout, as source and sink of regions of its parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from k3.cards import describe
from k3.construct import cards
from k3.hf.pieces import Region, in_blocks, overlap, within
from k3.layout import holder
from k3.model import Model
from k3.origin import Origin
from kernels.mx import BLOCK
from parallel.cards import Card, Group, TensorAxis
from parallel.stages import split_layers
from parallel.together import gather

WRITER = 0  # the rank that writes


class Live:
    """Writing touches this rank's part alone. Reading is collective: each part travels from one rank that holds it to rank 0.

    Nothing is sent between other ranks, and copies (data and context ranks, replicated parameters, the last stage's embedding)
    send nothing.
    """

    def __init__(self, model: Model):
        self.model, self.world = model, model.world
        self.cards = describe(model.k3)
        self._table = cards(model)
        config = self.world.config
        self._stages = holder(model.k3, split_layers(model.k3.layers, config))

    def dtype(self, name: str) -> torch.dtype:
        return self.cards[name].dtype.resolve(self.model.stages[0].config.params_dtype)

    def region(self, name: str) -> Region | None:
        if name not in self._table:
            return None
        card = self.cards[name]
        group = self.world.groups.ep if card.placement.group is Group.EXPERT else self.world.groups.tp
        return _share(card, group.rank(), group.size())

    @torch.no_grad()
    def write(self, name: str, region: Region, value: Tensor, scale: Tensor | None) -> None:
        own = self.region(name)
        assert own is not None
        self._table.tensor(name)[within(region, own)].copy_(value)
        if scale is not None:
            self._scales(name, own)[within(in_blocks(region), in_blocks(own))].copy_(scale)

    @torch.no_grad()
    def read(self, name: str, region: Region) -> Tensor | None:
        mine = self._table.tensor(name).detach() if name in self._table else None
        return self._collect(name, region, mine, self.dtype(name), lambda r: r)

    def scale(self, name: str, region: Region) -> Tensor | None:
        if name not in self._scaled:
            return None
        return self._collect(name, region, self._kept.get(name), torch.uint8, in_blocks)

    def _collect(
        self, name: str, region: Region, mine: Tensor | None, dtype: torch.dtype, units: Callable[[Region], Region]
    ) -> Tensor | None:
        """`region` of a tensor of which this rank holds `mine`, on rank 0. `units` turns regions into those of the tensor."""
        out: Tensor | None = None
        here, whole = self.world.rank, units(region)
        if here == WRITER:
            out = torch.empty([b - a for a, b in whole], dtype=dtype)
        for rank, held in self._holders(name, region):
            part = overlap(region, held)
            if part is None or here not in (rank, WRITER):
                continue
            part = units(part)
            if here == rank:
                assert mine is not None
                piece = mine[within(part, units(held))].contiguous()
                if rank != WRITER:
                    dist.send(piece.view(-1).view(torch.uint8).to(self.world.device), WRITER)
                    continue
            else:
                # raw bytes: every backend carries them, whatever the dtype
                shape = [b - a for a, b in part]
                raw = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device=self.world.device)
                dist.recv(raw, rank)
                piece = raw.view(dtype).view(shape)
            assert out is not None
            out[within(part, whole)].copy_(piece)
        return out

    def _holders(self, name: str, region: Region) -> Iterator[tuple[int, Region]]:
        """(rank, what it holds) of ranks that together hold the region once."""
        card = self.cards[name]
        stage = next(iter(self._stages(name))) % self.world.config.pp
        kind = "expert" if card.placement.group is Group.EXPERT else "dense"
        if (axis := _axis(card)) is None:
            yield self._ranks[kind, stage, 0], _share(card, 0, 1)
            return
        count = (self.world.groups.ep if kind == "expert" else self.world.groups.tp).size()
        size = card.shape[axis] // count
        first, last = region[axis]
        for number in range(first // size, -(-last // size)):
            yield self._ranks[kind, stage, number], _share(card, number, count)

    @cached_property
    def _ranks(self) -> dict[tuple[str, int, int], int]:
        """Where the first copy is: ("dense", pipeline rank, tensor rank) or ("expert", pipeline rank, expert rank) -> rank."""
        groups = self.world.groups
        places = (groups.tp.rank(), groups.dp_cp.rank(), groups.ep.rank(), groups.expt_dp.rank())
        out: dict[tuple[str, int, int], int] = {}
        for rank, (pp, tp, data, ep, expert_data) in enumerate(gather(self.world, (groups.pp.rank(), *places))):
            if data == 0:
                out["dense", pp, tp] = rank
            if expert_data == 0:
                out["expert", pp, ep] = rank
        return out

    @property
    def _kept(self) -> dict[str, Tensor]:
        return {} if self.model.origin is None else self.model.origin.scales

    @cached_property
    def _scaled(self) -> frozenset[str]:
        """The parameters whose scales are known on the ranks that hold them."""
        return frozenset(name for names in gather(self.world, sorted(self._kept)) for name in names)

    def _scales(self, name: str, own: Region) -> Tensor:
        if self.model.origin is None:
            self.model.origin = Origin()
        if name not in self.model.origin.scales:
            shape = [b - a for a, b in own]
            self.model.origin.scales[name] = torch.zeros(*shape[:-1], shape[-1] // BLOCK, dtype=torch.uint8)
        return self.model.origin.scales[name]


def _axis(card: Card) -> int | None:
    """Along which a parameter is cut, over expert or tensor ranks."""
    if card.placement.group is Group.EXPERT:
        return 0
    return {TensorAxis.ROWS: 0, TensorAxis.COLS: 1}.get(card.placement.tensor)


def _share(card: Card, number: int, count: int) -> Region:
    """What the rank `number` of `count` holds of a parameter."""
    region = [(0, n) for n in card.shape]
    if (axis := _axis(card)) is not None:
        size = card.shape[axis] // count
        region[axis] = (number * size, (number + 1) * size)
    return tuple(region)
