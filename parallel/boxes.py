"""Where a rank's tensors lie in the whole, uncut ones: as boxes, which any other layout can read back in pieces of its own; and
what gives a checkpoint its boxes.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from parallel.cards import Card, Group, TensorAxis
from parallel.world import World


@dataclass(frozen=True)
class Box:
    """A rank's part of one whole tensor: the elements [offset, offset + tensor.shape) of a tensor of `shape`."""

    name: str
    tensor: Tensor  # a view: what is loaded is written into it
    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]
    replica: int = 0  # of the ranks that hold this same box the one with 0 writes it

    @classmethod
    def whole(cls, name: str, tensor: Tensor, replica: int = 0) -> Box:
        return cls(name, tensor, tuple(tensor.shape), (0,) * tensor.dim(), replica)


@dataclass(frozen=True)
class Place:
    """Where the tensor that a rank holds of a parameter lies in the whole one: its shape, the offset, and which copy it is."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    replica: int

    def box(self, name: str, tensor: Tensor) -> Box:
        return Box(name, tensor, self.shape, self.offset, self.replica)

    def pieces(self, name: str, flat: Tensor, start: int, local: tuple[int, ...]) -> Iterator[Box]:
        """`flat` [n], the elements from `start` on of the flattened tensor of shape `local`, as rectangles of the whole one."""
        first = start
        for corner, sizes in rectangles(start, start + flat.numel(), local):
            count = math.prod(sizes)
            offset = tuple(o + c for o, c in zip(self.offset, corner))
            yield Box(name, flat[first - start : first - start + count].view(sizes), self.shape, offset, self.replica)
            first += count


def place(card: Card, tensor: Tensor, world: World) -> Place:
    """Where this rank's `tensor` lies. Of equal copies the one with replica 0 is another rank's from name to name, so that all
    ranks write about as much.
    """
    groups, axis = world.groups, card.placement.tensor
    offset = [0] * len(card.shape)
    if card.placement.group is Group.EXPERT:
        offset[0] = groups.ep.rank() * tensor.shape[0]
        copies = groups.expt_dp
    elif axis in (TensorAxis.ROWS, TensorAxis.COLS):
        at = 0 if axis is TensorAxis.ROWS else 1
        offset[at] = groups.tp.rank() * tensor.shape[at]
        copies = groups.dp_cp
    else:
        copies = groups.tp_dp_cp
    replica = (copies.rank() - zlib.crc32(card.name.encode())) % copies.size()
    if card.placement.both_ends and groups.pp.rank() > 0:  # the first stage's copies write it
        replica += copies.size()
    return Place(card.shape, tuple(offset), replica)


def rectangles(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(corner, sizes) of the boxes that make up the elements [start, stop) of a flattened tensor of `shape`, in their order.

    At most two for each axis but the last and one more: three of a matrix, five of a stack of matrices.
    """
    if start >= stop:
        return
    if len(shape) < 2:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    inner, below = math.prod(shape[1:]), shape[1:]
    first, last = -(-start // inner), stop // inner  # [first, last) are covered whole

    def part(row: int, begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        for corner, sizes in rectangles(begin, end, below):
            yield (row, *corner), (1, *sizes)

    if first > last:  # begins and ends inside one row
        yield from part(last, start - last * inner, stop - last * inner)
        return
    if start < first * inner:
        yield from part(first - 1, start - (first - 1) * inner, inner)
    if first < last:
        yield (first, *[0] * len(below)), (last - first, *below)
    if last * inner < stop:
        yield from part(last, 0, stop - last * inner)


class StateProvider(Protocol):
    """What a checkpoint stores under one name."""

    @property
    def per_rank(self) -> bool:
        """Whether each rank has a state of its own. Under the layout that wrote them each gets back its own, under any other all
        get rank 0's, and `loaded` must make a new one of it.
        """

    def boxes(self) -> Iterable[Box]:
        """This rank's part of the state, to be saved or to be loaded into; the names are the same under every layout."""

    def loaded(self, anew: int | None = None) -> None:
        """Takes over what was loaded into the tensors of the last `boxes`. `anew`: this rank's number, where `per_rank` state of
        rank 0 was loaded because another layout wrote it; else None.
        """


def key(provider: str, of: StateProvider, name: str, rank: int) -> str:
    """The name under which a checkpoint stores a tensor of a provider."""
    return f"{provider}.rank_{rank:05}.{name}" if of.per_rank else f"{provider}.{name}"


def sharded(boxes: Mapping[str, Sequence[Box]]) -> dict[str, Any]:
    """The boxes of each stored tensor as megatron-core's planners take them. Its ShardedTensor takes any box where it claims no
    regular grid (axis_fragmentations=None): no rank's flat range needs padding, and a rank may hold several boxes of a tensor.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor, LocalShardsContainer

    def one(name: str, box: Box) -> Any:
        data = box.tensor.detach()
        of = ShardedTensor(name, data, data.dtype, tuple(data.shape), box.shape, box.offset, None, box.replica)
        return CheckpointableShardedTensor.from_sh_ten(of)

    return {
        name: one(name, those[0]) if len(those) == 1 else LocalShardsContainer([one(name, box) for box in those])
        for name, those in boxes.items()
    }
