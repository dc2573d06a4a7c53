"""Where parameters lie in ZeRO's gradient buffers: so that the edges of the even cut fall between logical matrices.

megatron-core decides which parameters share a bucket; the order inside one is chosen here. A rank of the cut is a bin of equal
size. Bins are filled with whole parameters, whose work is spread evenly; one made of heads, experts or gate and up may continue
in the next bin where its matrices meet; embeddings, norms and biases, which may be cut anywhere, fill what is left. A few orders
are tried, megatron-core's own among them, and the one that leaves the least to send is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from torch import nn

from parallel.cards import Card, CardTable, Optimizer, TensorAxis

ALIGN = 16  # elements; where a parameter begins
SLACK = (0.0, 0.005, 0.01, 0.02)  # of a bucket, as padding


@dataclass(frozen=True)
class Item:
    """A parameter and its consecutive matrices."""

    size: int
    matrices: tuple[int, ...] = ()  # elements of each, repeated up to `size`; none where a cut may fall anywhere
    work: float = 0.0  # Newton-Schulz FLOPs of all

    @property
    def period(self) -> int:
        return sum(self.matrices)

    def matrix_at(self, element: int) -> tuple[int, int] | None:
        """[first, last) of the matrix that a cut before `element` divides."""
        if not self.matrices or not 0 < element < self.size:
            return None
        base = element - element % self.period
        for first, size in zip(accumulate(self.matrices, initial=base), self.matrices):
            if first < element < first + size:
                return first, first + size
        return None

    def breaks(self, most: int) -> Iterator[int]:
        """Where it can be divided without dividing a matrix: offsets up to `most`, the largest first."""
        if self.matrices:
            offsets = list(accumulate(self.matrices, initial=0))[:-1]
            for base in range(most - most % self.period, -1, -self.period):
                yield from (base + o for o in reversed(offsets) if 0 < base + o <= min(most, self.size - 1))


Places = dict[int, int]  # an item's number -> the element of the bucket that it begins with


def item_of(card: Card, parameter: nn.Parameter, tensor_size: int) -> Item:
    """What the card says of this rank's part of the parameter."""
    if not card.blocks.is_matrix or card.optimizer is not Optimizer.MUON:
        return Item(parameter.numel())
    rows, cols = parameter.shape[-2:]
    in_pieces = tensor_size > 1 and card.placement.tensor is TensorAxis.ROWS and not card.blocks.per_head
    parts = (rows,) if in_pieces else tuple(part.rows for part in card.blocks.parts)
    count = parameter.numel() // (sum(parts) * cols)
    work = sum(4.0 * min(r, cols) ** 2 * max(r, cols) + 2.0 * min(r, cols) ** 3 for r in parts)
    return Item(parameter.numel(), tuple(r * cols for r in parts), work * count)


def rearranged(layout: Any, items: Mapping[nn.Parameter, Item]) -> Any:
    """megatron-core's FullParamLayout with its parameters in a better order inside each bucket; all ranks get the same."""
    return replace(layout, layouts={key: _buffer(buffer, items) for key, buffer in layout.layouts.items()})


def items_of(cards: CardTable, tensor_size: int) -> dict[nn.Parameter, Item]:
    return {parameter: item_of(card, parameter, tensor_size) for card, parameter in cards.trained()}


def _buffer(layout: Any, items: Mapping[nn.Parameter, Item]) -> Any:
    ranks = layout.num_optimizer_shards
    if ranks == 1:
        return layout
    members: list[list[nn.Parameter]] = [[] for _ in layout.bucket_indices]
    for parameter, (_, _, bucket) in layout.param_index_map.items():
        members[bucket].append(parameter)
    index, buckets, start = {}, [], 0
    for number, (parameters, (first, last)) in enumerate(zip(members, layout.bucket_indices)):
        chosen = [items[p] for p in parameters]
        given = {i: layout.param_index_map[p][0] - first for i, p in enumerate(parameters)}
        places, size = arrange(chosen, ranks, given, last - first)
        for i, p in enumerate(parameters):
            index[p] = start + places[i], start + places[i] + p.numel(), number
        buckets.append((start, start + size))
        start += size
    unpadded = [sum(p.numel() for p in parameters) for parameters in members]
    return replace(layout, param_index_map=index, bucket_indices=buckets, per_bucket_numel_unpadded=unpadded)


def arrange(items: Sequence[Item], ranks: int, given: Places, size: int) -> tuple[Places, int]:
    """Where the items begin, and the bucket's size. given, size: megatron-core's answer, which is kept if it is as good."""
    best = (cost(items, given, size // ranks, ranks), given, size)
    least = -(-sum(_aligned(item.size) for item in items) // ranks)
    for slack in SLACK:
        share = -(-int(least * (1 + slack)) // 128) * 128  # megatron-core pads buckets to multiples of 128, and of the ranks
        for even, early in ((True, False), (True, True), (False, False)):
            places = _packed(items, share, ranks, even, early)
            if places is not None and (found := cost(items, places, share, ranks)) < best[0]:
                best = (found, places, share * ranks)
    return best[1:]


def cost(items: Sequence[Item], places: Places, share: int, ranks: int) -> float:
    """Elements that would move: pieces of cut matrices, and work beyond an even share; and elements of padding."""
    loads, moved, padding = [0.0] * ranks, 0, share * ranks - sum(item.size for item in items)
    for number, item in enumerate(items):
        start, seen = places[number], 0
        for rank in range(start // share, min(ranks - 1, (start + item.size - 1) // share) + 1):
            low, high = max(start, rank * share), min(start + item.size, (rank + 1) * share)
            loads[rank] += item.work * (high - low) / item.size
            matrix = item.matrix_at(low - start)
            if matrix is not None and matrix[0] >= seen:
                edges = [matrix[0] + start, *range(low, matrix[1] + start, share), matrix[1] + start]
                moved += matrix[1] - matrix[0] - max(b - a for a, b in pairwise(edges))
                seen = matrix[1]
    work, matrices = sum(loads), sum(item.size for item in items if item.matrices)
    excess = sum(max(0.0, load - 1.05 * work / ranks) for load in loads)
    return moved + (excess * matrices / work if work else 0.0) + padding


def _aligned(element: int) -> int:
    return -(-element // ALIGN) * ALIGN


def _packed(items: Sequence[Item], share: int, ranks: int, even: bool, early: bool) -> Places | None:
    """One try with bins of `share` elements.

    even: choose what keeps the work of the bins in step; else the largest that fits. early: what may be cut anywhere follows as
    soon as a bin has its share of the work, and goes on into the next bin.
    """
    waiting: dict[Item, list[int]] = {}  # alike ones together
    for number in sorted(range(len(items)), key=lambda n: -items[n].size):
        waiting.setdefault(items[number], []).append(number)
    spare = share * ranks - sum(_aligned(item.size) for item in items)
    mean = sum(item.work for item in items) / ranks
    places: Places = {}
    at, load = 0, 0.0  # load: of the bin that is filled

    def put(item: Item, start: int) -> None:
        nonlocal at, load
        places[waiting[item].pop()] = start
        if not waiting[item]:
            del waiting[item]
        stop = start + item.size
        inside = stop - max(start, stop // share * share)
        load = item.work * inside / item.size + (load if stop // share == at // share else 0.0)
        at = _aligned(stop)

    while waiting:
        room = share - at % share
        matrices = [item for item in waiting if item.matrices]
        if early and load >= mean and (fillers := [item for item in waiting if not item.matrices and item.size >= room]):
            put(min(fillers, key=lambda item: item.size), at)
        elif room == share and (long := [item for item in matrices if item.size > share]):
            put(max(long, key=lambda item: item.size), at)
        elif fitting := [item for item in matrices if item.size <= room]:
            ahead = mean * (1 - room / share)
            put(
                min(fitting, key=lambda i: abs(load + i.work - ahead - mean * i.size / share)) if even else fitting[0],
                at,
            )
        elif (split := _split(matrices, at, room)) and split[0] <= spare:
            gap, item = split
            for small in [f for f in waiting if not f.matrices and f.size <= gap]:
                while small in waiting and _aligned(small.size) <= gap:
                    put(small, at)
                    gap -= _aligned(small.size)
            spare -= gap
            put(item, at + gap)
        elif fillers := [item for item in waiting if not item.matrices]:
            longer = [f for f in fillers if f.size >= room]
            put(min(longer, key=lambda f: f.size) if longer else max(fillers, key=lambda f: f.size), at)
        elif room <= spare:
            spare -= room
            at, load = at + room, 0.0
        else:
            put(matrices[0], at)
    return places if at <= share * ranks else None


def _split(matrices: Sequence[Item], at: int, room: int) -> tuple[int, Item] | None:
    """The smallest gap after which an item can begin so that the bin's end falls between two of its matrices."""
    found = []
    for number, item in enumerate(matrices):
        for _, offset in zip(range(ALIGN), item.breaks(room)):
            if (at + room - offset) % ALIGN == 0:
                found.append((room - offset, number))
                break
    return (min(found)[0], matrices[min(found)[1]]) if found else None
