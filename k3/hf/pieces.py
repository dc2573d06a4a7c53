"""Which region of which parameter a published tensor is, read from the cards (spec 10.1), and who gives and takes regions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from k3.hf.format import CheckpointError, Entry
from k3.origin import Origin
from kernels.mx import BLOCK
from parallel.cards import Card

Region = tuple[tuple[int, int], ...]  # [first, last) along each axis of a parameter's global, uncut tensor


class Source(Protocol):
    """Gives regions of a model's parameters by card name, whichever way it holds them. On several ranks calls are collective."""

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str, region: Region) -> Tensor | None:
        """The values, on the rank that writes; None on the others."""

    def scale(self, name: str, region: Region) -> Tensor | None:
        """The E8M0 codes uint8 [..., cols / 32] that came with a region of packed weights, where they are known."""


class Released(Protocol):
    """What a released checkpoint has beside the values of its model, whichever way that is kept."""

    @property
    def where(self) -> Path: ...

    @property
    def origin(self) -> Origin: ...

    @property
    def config_text(self) -> str:
        """Its config.json, as it is."""

    @property
    def passed_through(self) -> Sequence[Entry]:
        """Its tensors that are no part of the language model, in their order."""

    def extra(self, name: str) -> Tensor:
        """One of those."""

    def kept_scale(self, piece: Piece) -> Tensor | None:
        """The E8M0 codes that came with a packed weight, in the published shape."""


class Sink(Protocol):
    """Takes the regions that it holds."""

    def region(self, name: str) -> Region | None:
        """What it holds of the parameter; None: nothing."""

    def write(self, name: str, region: Region, value: Tensor, scale: Tensor | None) -> None:
        """`scale`: as Source.scale, of weights that were stored packed."""


@dataclass(frozen=True)
class Piece:
    """One published tensor `name` and the region of our parameter that it is."""

    name: str
    card: Card
    region: Region

    @property
    def packed(self) -> str:
        return f"{self.name}_packed"

    @property
    def scale(self) -> str:
        return f"{self.name}_scale"

    @property
    def is_a_log(self) -> bool:
        return self.card.name.endswith(".A_log")

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """As published: without the expert axis, and a convolution [channels, 1, width]. A_log without its padding."""
        shape = tuple(last - first for first, last in (self.region[1:] if self.card.blocks.per_expert else self.region))
        return (shape[0], 1, shape[1]) if self.card.role == "convolution" else shape

    @property
    def packed_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the packed elements, two a byte, and of their scales."""
        return (*self.shape[:-1], self.shape[-1] // 2), (*self.shape[:-1], self.shape[-1] // BLOCK)

    def stored_index(self, region: Region) -> Region:
        """Where a part of the region lies in the published tensor (A_log: in the flattened one)."""
        inside = tuple((a - first, b - first) for (a, b), (first, _) in zip(region, self.region))
        if self.card.blocks.per_expert:
            return inside[1:]
        return (inside[0], (0, 1), inside[1]) if self.card.role == "convolution" else inside


def pieces(cards: Iterable[Card]) -> Iterator[Piece]:
    """Every published tensor of the model, in the cards' order; expert by expert where they are stored together."""
    for card in cards:
        whole = tuple((0, n) for n in card.shape)
        for expert in range(card.shape[0]) if card.blocks.per_expert else (None,):
            for p in card.published:
                if expert is None:
                    yield Piece(p.name, card, (p.rows or whole[0], *whole[1:]))
                else:
                    yield Piece(p.name.format(expert=expert), card, ((expert, expert + 1), p.rows or whole[1], whole[2]))


def overlap(one: Region, other: Region) -> Region | None:
    """What both cover; None where that is nothing."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other))
    return None if any(first >= last for first, last in both) else both


def within(region: Region, outer: Region) -> tuple[slice, ...]:
    """`region` as an index into a tensor that holds `outer`."""
    return tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(region, outer))


def in_blocks(region: Region) -> Region:
    """The region of the scales, one for BLOCK columns."""
    *lead, (first, last) = region
    return (*lead, (first // BLOCK, last // BLOCK))


def check_blocks(cards: Iterable[Card]) -> None:
    """Raises CheckpointError for a parameter whose rows MXFP4 cannot pack."""
    for card in cards:
        if card.quantise is not None and card.shape[-1] % BLOCK:
            raise CheckpointError(f"quantise=mxfp4: {card.name} has rows of {card.shape[-1]}; MXFP4 needs a multiple of {BLOCK}")
