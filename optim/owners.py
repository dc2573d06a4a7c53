"""Matrices that ZeRO's cut divides: one of the ranks that hold pieces of a matrix orthogonalises the whole.

The owner is the rank with most of the matrix. All ranks of a group derive the same plan from the same parts, so nothing is
negotiated: one collective brings the pieces of all its cut matrices to their owners, another brings the updates back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from optim.matrices import Run
from parallel.shards import Shard


@dataclass(frozen=True)
class CutMatrix:
    """A logical matrix of parameter `name` that lies in the parts of several ranks."""

    name: str
    place: tuple[int, int]  # the parameter's run, and the matrix in it
    rows: int
    cols: int
    first: int  # its first element in the flattened parameter
    pieces: tuple[tuple[int, int], ...]  # by rank: the rank's elements [start, stop) of the matrix; none where start == stop

    @property
    def owner(self) -> int:
        """The rank with most elements, of equal ones the lowest."""
        sizes = [stop - start for start, stop in self.pieces]
        return sizes.index(max(sizes))

    def held_by(self, rank: int) -> bool:
        return self.length(rank) > 0

    def length(self, rank: int) -> int:
        return self.pieces[rank][1] - self.pieces[rank][0]

    def piece(self, whole: Tensor, rank: int) -> Tensor:
        """A view of the rank's elements of the flattened matrix."""
        return whole[slice(*self.pieces[rank])]


class Exchange:
    """All cut matrices of one process group in one dtype.

    `held` are those this rank has a piece of; `owned`, among them, those it orthogonalises. Both are in the model's order.
    """

    def __init__(self, group: Any, rank: int, matrices: Sequence[CutMatrix], like: Tensor):
        self.group, self.rank = group, rank
        self._like = like.new_empty(0)  # dtype and device, also of a rank that holds nothing
        ranks = range(len(matrices[0].pieces))
        self.held = [m for m in matrices if m.held_by(rank)]
        self.owned = [m for m in self.held if m.owner == rank]
        self._kept = [i for i, m in enumerate(self.held) if m.owner == rank]
        # (matrix, other rank) of what travels, in the order of its bytes: by rank, then by matrix
        self._away = [(i, r) for r in ranks if r != rank for i, m in enumerate(self.held) if m.owner == r]
        self._home = [(i, r) for r in ranks if r != rank for i, m in enumerate(self.owned) if m.held_by(r)]
        self._away_lengths = [self.held[i].length(rank) for i, _ in self._away]
        self._home_lengths = [self.owned[i].length(r) for i, r in self._home]
        self._away_sizes = [sum(n for (_, to), n in zip(self._away, self._away_lengths) if to == r) for r in ranks]
        self._home_sizes = [sum(n for (_, of), n in zip(self._home, self._home_lengths) if of == r) for r in ranks]

    def to_owners(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """From flat pieces of the `held` matrices to the `owned` ones whole, flat. Every rank of the group must call it."""
        wholes = [self._like.new_empty(m.rows * m.cols) for m in self.owned]
        for i, matrix, whole in zip(self._kept, self.owned, wholes):
            matrix.piece(whole, self.rank).copy_(pieces[i])
        received = self._all_to_all([pieces[i] for i, _ in self._away], self._away_sizes, self._home_sizes)
        for (i, rank), piece in zip(self._home, received.split(self._home_lengths)):
            self.owned[i].piece(wholes[i], rank).copy_(piece)
        return wholes

    def to_holders(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """The way back: from the `owned` matrices to flat pieces of the `held` ones. Every rank of the group must call it."""
        sent = [self.owned[i].piece(wholes[i], rank) for i, rank in self._home]
        received = self._all_to_all(sent, self._home_sizes, self._away_sizes)
        pieces = [self._like] * len(self.held)
        for i, matrix, whole in zip(self._kept, self.owned, wholes):
            pieces[i] = matrix.piece(whole, self.rank)
        for (i, _), piece in zip(self._away, received.split(self._away_lengths)):
            pieces[i] = piece
        return pieces

    def _all_to_all(self, sent: list[Tensor], sizes: list[int], expected: list[int]) -> Tensor:
        received = self._like.new_empty(sum(expected))
        dist.all_to_all_single(received, torch.cat([self._like, *sent]), expected, sizes, group=self.group)
        return received


def plan(shards: Mapping[str, Shard], runs: Mapping[str, Sequence[Run]]) -> list[Exchange]:
    """The exchanges of a step, in the same order on every rank; none where no matrix is cut.

    shards, runs: of every parameter of Muon on any rank, in the model's order.
    """
    cut: dict[tuple[Any, torch.dtype], tuple[Shard, list[CutMatrix]]] = {}
    for name, shard in shards.items():
        if matrices := _cut_matrices(name, shard, runs[name]):
            dtype = shard.parameter.dtype
            master = torch.float32 if dtype == torch.bfloat16 else dtype
            cut.setdefault((shard.group, master), (shard, []))[1].extend(matrices)
    return [
        Exchange(group, shard.rank, matrices, torch.empty(0, dtype=master, device=shard.parameter.device))
        for (group, master), (shard, matrices) in cut.items()
    ]


def _cut_matrices(name: str, shard: Shard, runs: Sequence[Run]) -> list[CutMatrix]:
    """Every matrix with an edge between two parts inside it: at most one an edge."""
    edges = [start for start, stop in shard.parts if 0 < start < stop]
    places = {(number, i) for number, run in enumerate(runs) for edge in edges if (i := run.at(edge)) is not None}
    out = []
    for number, i in sorted(places):
        run = runs[number]
        first = run.first + i * run.stride
        pieces = tuple((min(max(start - first, 0), run.size), min(max(stop - first, 0), run.size)) for start, stop in shard.parts)
        out.append(CutMatrix(name, (number, i), run.rows, run.cols, first, pieces))
    return out
