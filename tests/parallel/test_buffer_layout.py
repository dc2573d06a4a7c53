"""Where parameters lie in buckets: disjoint, never worse than megatron-core's, and cut between matrices if possible."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import k3
from k3.cards import describe
from parallel.buffer_layout import Item, Places, arrange, cost, item_of
from parallel.cards import Card, Group, Placement, Published, TensorAxis, heads, whole
from parallel.cards import Optimizer as Kind

FILLER = Item(1000)


def _given(items: list[Item], ranks: int) -> tuple[Places, int]:
    """megatron-core's answer: from the last to the first, each at a multiple of 64."""
    at, places = 0, {}
    for number in reversed(range(len(items))):
        at = -(-at // 64) * 64
        places[number] = at
        at += items[number].size
    unit = math.lcm(ranks, 128)
    return places, -(-at // unit) * unit


def _cut(items: list[Item], places: Places, share: int) -> int:
    return sum(
        len({item.matrix_at(edge - places[i]) for edge in range(share, places[i] + item.size, share)} - {None})
        for i, item in enumerate(items)
    )


def _arranged(items: list[Item], ranks: int) -> tuple[Places, int]:
    places, size = arrange(items, ranks, *_given(items, ranks))
    assert sorted(places) == list(range(len(items))) and size % math.lcm(ranks, 128) == 0
    spans = sorted((start, start + items[i].size) for i, start in places.items())
    assert all(a[1] <= b[0] for a, b in pairwise(spans)) and spans[-1][1] <= size
    assert all(start % 16 == 0 for start, _ in spans)
    return places, size


def _item(card: Card, shape: tuple[int, ...], tensor_size: int = 1) -> Item:
    return item_of(card, cast(Any, SimpleNamespace(numel=lambda: math.prod(shape), shape=torch.Size(shape))), tensor_size)


def _of(preset: str, group: Group) -> list[Item]:
    return [_item(c, c.shape) for c in describe(k3.preset(preset)).values() if c.placement.group is group and _trained(c)]


def _trained(card: Card) -> bool:
    return card.optimizer is not Kind.BALANCE


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("preset", ["tiny", "nano"])
def test_never_worse_than_the_order_of_megatron_core(preset: str, ranks: int) -> None:
    for group in Group:
        items = _of(preset, group)
        given, size = _given(items, ranks)
        places, new = _arranged(items, ranks)
        assert cost(items, places, new // ranks, ranks) <= cost(items, given, size // ranks, ranks)
        assert new <= size * 1.02 + 128 * ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_matrix_of_a_model_is_cut(ranks: int) -> None:
    items = _of("nano", Group.DENSE)
    given, size = _given(items, ranks)
    places, new = _arranged(items, ranks)
    assert _cut(items, given, size // ranks) > 0 == _cut(items, places, new // ranks)


def test_edges_fall_between_heads_or_into_what_may_be_cut() -> None:
    heads, matrix = Item(8 * 640, (640,), 8.0), Item(3 * 640, (3 * 640,), 3.0)
    places, size = _arranged([heads, matrix, matrix, matrix, FILLER], 2)
    assert _cut([heads, matrix, matrix, matrix, FILLER], places, size // 2) == 0
    assert _cut([heads, matrix, matrix, matrix, FILLER], *(_given([heads, matrix, matrix, matrix, FILLER], 2)[0], 9088)) > 0


def test_cost_is_what_an_owner_lacks() -> None:
    one = Item(1280, (1280,))
    assert cost([one], {0: 0}, 640, 2) == 640  # half of it
    assert cost([one], {0: 0}, 512, 3) == 1280 - 512 + 256  # its largest piece stays; 256 of padding
    assert cost([Item(1280)], {0: 0}, 640, 2) == 0
    assert cost([one, one], {0: 0, 1: 1280}, 1280, 2) == 0
    work = Item(1280, (1280,), 1.0)
    assert cost([work, Item(1280)], {0: 0, 1: 1280}, 1280, 2) == pytest.approx((1 - 1.05 / 2) * 1280)  # work that moves


def test_matrices_of_a_parameter_are_those_of_its_card() -> None:
    card = Card(
        "q", (Published("q"),), (96, 10), heads(("key", 8), ("value", 4)), Placement(TensorAxis.ROWS), Kind.MUON, decay=True
    )
    item = _item(card, (96, 10))
    assert item.matrices == (80, 40) and [item.matrix_at(e) for e in (80, 81, 120, 121)] == [None, (80, 120), None, (120, 200)]
    assert list(item.breaks(250)) == [240, 200, 120, 80]
    assert _item(card, (48, 10), 2).matrices == (80, 40)  # heads go whole to tensor ranks
    single = Card("g", (Published("g"),), (96, 10), whole(96), Placement(TensorAxis.ROWS), Kind.MUON, decay=True)
    assert _item(single, (48, 10), 2).matrices == (480,)
