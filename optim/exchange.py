"""The way of matrices to the ranks that orthogonalise them, and of updates back: asynchronous, one gradient bucket at a time.

`Exchange` moves what the owners lack, peer to peer. `Gather` brings everything to everyone: the naive form, for comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Matrix:
    """A logical matrix of parameter `name`, in the parts of one rank or of several."""

    name: str
    place: tuple[int, int]  # the parameter's run, and the matrix in it
    rows: int
    cols: int
    first: int  # its first element in the flattened parameter
    pieces: tuple[tuple[int, int, int], ...]  # (rank, start, stop): the elements of the matrix that each of its ranks has
    owner: int  # the rank that orthogonalises it

    @property
    def size(self) -> int:
        return self.rows * self.cols

    @property
    def holders(self) -> list[int]:
        return [rank for rank, _, _ in self.pieces]

    def span(self, rank: int) -> tuple[int, int]:
        """[start, stop) of the rank's elements of the matrix, (0, 0) where it has none."""
        return next(((start, stop) for of, start, stop in self.pieces if of == rank), (0, 0))

    def length(self, rank: int) -> int:
        start, stop = self.span(rank)
        return stop - start

    def held_by(self, rank: int) -> bool:
        return self.length(rank) > 0

    def piece(self, whole: Tensor, rank: int) -> Tensor:
        """A view of the rank's elements of the flattened matrix."""
        return whole[slice(*self.span(rank))]


class Pending:
    """A collective that runs; `wait` gives what is made of its result, and lets go of its buffers. Called once."""

    def __init__(self, handle: Any, finish: Callable[[], list[Tensor]]):
        self._handle, self._finish = handle, finish

    def wait(self) -> list[Tensor]:
        if self._handle is not None:
            self._handle.wait()
        return self._finish()


@dataclass
class Space:
    """Memory of one way to the owners. `pieces`, views to be filled, are those of this rank, in the order of `held`."""

    pieces: list[Tensor]
    sent: Tensor
    wholes: list[Tensor]  # of the owned matrices; pieces that need not travel lie here at once


class Route(Protocol):
    """What Muon needs of both forms. Every rank of the group calls `to_owners` and `to_holders` in the same order.

    `held` are the matrices that this rank has a piece of, `owned` those it orthogonalises, both in the model's order.
    """

    held: list[Matrix]
    owned: list[Matrix]
    sent_bytes: int  # by this rank in a step, both ways together

    def space(self) -> Space:
        """Where this rank's pieces go."""

    def to_owners(self, space: Space) -> Pending:
        """Starts the way; what comes of it are the `owned` matrices whole, flat."""

    def to_holders(self, wholes: Sequence[Tensor]) -> Pending:
        """Starts the way back of the `owned` matrices; what comes of it are flat pieces of the `held` ones."""


class Exchange:
    """The matrices of one bucket that their owners do not hold whole. `matrices`: at least one, in the model's order."""

    def __init__(self, group: Any, rank: int, size: int, matrices: Sequence[Matrix], like: Tensor):
        self.group, self.rank = group, rank
        self._like = like.new_empty(0)  # dtype and device, also of a rank that holds nothing
        ranks = range(size)
        self.held = [m for m in matrices if m.held_by(rank)]
        self.owned = [m for m in matrices if m.owner == rank]
        number = {m: i for i, m in enumerate(self.owned)}
        self._kept = [(i, number[m]) for i, m in enumerate(self.held) if m.owner == rank]
        # (matrix, other rank) of what travels, in the order of its bytes: by rank, then by matrix
        self._away = [(i, r) for r in ranks if r != rank for i, m in enumerate(self.held) if m.owner == r]
        self._home = [(i, r) for r in ranks if r != rank for i, m in enumerate(self.owned) if m.held_by(r)]
        self._away_lengths = [self.held[i].length(rank) for i, _ in self._away]
        self._home_lengths = [self.owned[i].length(r) for i, r in self._home]
        self._away_sizes = [sum(n for (_, to), n in zip(self._away, self._away_lengths) if to == r) for r in ranks]
        self._home_sizes = [sum(n for (_, of), n in zip(self._home, self._home_lengths) if of == r) for r in ranks]
        self.sent_bytes = (sum(self._away_lengths) + sum(self._home_lengths)) * like.element_size()

    def space(self) -> Space:
        sent = self._like.new_empty(sum(self._away_sizes))
        wholes = [self._like.new_empty(m.size) for m in self.owned]
        return Space(self._pieces(sent, wholes), sent, wholes)

    def to_owners(self, space: Space) -> Pending:
        received, handle = self._all_to_all(space.sent, self._away_sizes, self._home_sizes)

        def finish() -> list[Tensor]:
            for (i, rank), piece in zip(self._home, received.split(self._home_lengths)):
                self.owned[i].piece(space.wholes[i], rank).copy_(piece)
            return space.wholes

        return Pending(handle, finish)

    def to_holders(self, wholes: Sequence[Tensor]) -> Pending:
        sent = torch.cat([self._like, *(self.owned[i].piece(wholes[i], rank) for i, rank in self._home)])
        received, handle = self._all_to_all(sent, self._home_sizes, self._away_sizes)
        return Pending(handle, lambda: self._pieces(received, wholes))

    def _pieces(self, travelling: Tensor, wholes: Sequence[Tensor]) -> list[Tensor]:
        pieces = [self._like] * len(self.held)
        for i, number in self._kept:
            pieces[i] = self.held[i].piece(wholes[number], self.rank)
        for (i, _), piece in zip(self._away, travelling.split(self._away_lengths)):
            pieces[i] = piece
        return pieces

    def _all_to_all(self, sent: Tensor, sizes: list[int], expected: list[int]) -> tuple[Tensor, Any]:
        received = self._like.new_empty(sum(expected))
        return received, dist.all_to_all_single(received, sent, expected, sizes, group=self.group, async_op=True)


class Gather:
    """All matrices of one bucket, whole on every rank, each of which orthogonalises all of them and keeps its own pieces."""

    def __init__(self, group: Any, rank: int, size: int, matrices: Sequence[Matrix], like: Tensor):
        self.group, self.rank = group, rank
        self._like = like.new_empty(0)
        self.held = [m for m in matrices if m.held_by(rank)]
        self.owned = list(matrices)
        self._ranks = range(size)
        self._longest = max(sum(m.length(r) for m in matrices) for r in self._ranks)  # an all-gather takes equal parts
        self.sent_bytes = self._longest * (size - 1) * like.element_size()

    def space(self) -> Space:
        sent = self._like.new_empty(self._longest)
        lengths = [m.length(self.rank) for m in self.held]
        return Space(list(sent[: sum(lengths)].split(lengths)) if lengths else [], sent, [])

    def to_owners(self, space: Space) -> Pending:
        gathered = self._like.new_empty(len(self._ranks) * self._longest)
        handle = dist.all_gather_into_tensor(gathered, space.sent, group=self.group, async_op=True)
        return Pending(handle, lambda: self._wholes(gathered))

    def _wholes(self, gathered: Tensor) -> list[Tensor]:
        at = [rank * self._longest for rank in self._ranks]
        wholes = []
        for matrix in self.owned:
            pieces = []
            for rank in matrix.holders:
                pieces.append(gathered[at[rank] : at[rank] + matrix.length(rank)])
                at[rank] += matrix.length(rank)
            wholes.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces))
        return wholes

    def to_holders(self, wholes: Sequence[Tensor]) -> Pending:
        own = [m.piece(whole, self.rank) for m, whole in zip(self.owned, wholes) if m.held_by(self.rank)]
        return Pending(None, lambda: own)
