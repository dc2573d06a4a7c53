"""Matrices of one shape, from wherever they lie, put together for one call of Newton-Schulz under a bound on memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from kernels.newton_schulz import default_chunk
from optim.table import Row


@dataclass
class Held:
    """Same-shaped matrices of one parameter in this rank's part: views of its tensors, and their place in the report."""

    row: Row
    weight: Tensor  # [n, rows, cols], as the next two
    momentum: Tensor
    gradient: Tensor
    rms: Tensor  # [n], filled here

    @property
    def matrices(self) -> Tensor:
        return self.weight

    def cut(self, first: int, last: int) -> Held:
        weight, momentum, gradient, rms = (t[first:last] for t in (self.weight, self.momentum, self.gradient, self.rms))
        return Held(self.row, weight, momentum, gradient, rms)


@dataclass
class Owned:
    """One matrix put together from several ranks' parts."""

    row: Row
    matrices: Tensor  # [1, rows, cols]: the Newton-Schulz input, then the update
    rms: Tensor  # [1], filled here

    def cut(self, first: int, last: int) -> Owned:
        return self


Piece = Held | Owned


def batches(pieces: list[Piece], tensor_size: int) -> Iterator[list[Piece]]:
    """Runs of at most `default_chunk` elements (at least one matrix), so that no copy of a whole model is ever made.

    tensor_size: of how many pieces like these each matrix is put together before it is worked on.
    """
    rows, cols = pieces[0].matrices.shape[1:]
    limit = max(1, default_chunk(pieces[0].matrices.device) // (rows * cols * tensor_size))
    batch: list[Piece] = []
    room = limit
    for piece in pieces:
        first, count = 0, len(piece.matrices)
        while first < count:
            last = min(count, first + room)
            batch.append(piece.cut(first, last))
            room -= last - first
            first = last
            if room == 0:
                yield batch
                batch, room = [], limit
    if batch:
        yield batch
