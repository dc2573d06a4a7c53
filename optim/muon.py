"""Per-Head Muon: momentum, then Newton-Schulz on every logical matrix by itself (report 2.5, recipe inherited from K2).

One joint orthogonalisation of all heads lets heads with a large momentum take the whole update; by itself each head gets the
same. The cards say where the heads, the fused gate and up, and the experts lie.

Momentum, weight decay and the change of the weights are elementwise, on this rank's part of each parameter. Newton-Schulz needs
whole matrices. Of one that ZeRO's cut divides, the owner gets all pieces (`optim/owners.py`). One that tensor ranks cut is
gathered and orthogonalised on all of them, and each keeps its own rows or columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.newton_schulz import default_chunk, orthogonalise
from optim.config import MuonConfig, MuonPrecision
from optim.matrices import Run, runs_of
from optim.owners import CutMatrix, Exchange, plan
from optim.table import Row
from parallel.shards import Shards


@dataclass(frozen=True)
class _Dials:
    """Of one step; `scale` multiplies every gradient."""

    lr: float
    decay: float
    scale: float


@dataclass
class _Held:
    """Same-shaped matrices of one parameter in this rank's part: views of its tensors, and their place in the report."""

    row: Row
    weight: Tensor  # [n, rows, cols], as the next two
    momentum: Tensor
    gradient: Tensor
    rms: Tensor  # [n], filled here

    @property
    def matrices(self) -> Tensor:
        return self.weight

    def cut(self, first: int, last: int) -> _Held:
        weight, momentum, gradient, rms = (t[first:last] for t in (self.weight, self.momentum, self.gradient, self.rms))
        return _Held(self.row, weight, momentum, gradient, rms)


@dataclass
class _Owned:
    """One matrix put together from several ranks' parts."""

    row: Row
    matrices: Tensor  # [1, rows, cols]: the Newton-Schulz input, then the update
    rms: Tensor  # [1], filled here

    def cut(self, first: int, last: int) -> _Owned:
        return self


_Piece = _Held | _Owned


class Muon:
    """Momenta of the given parameters and their update. `masters` holds this rank's parts, as `shards` says."""

    def __init__(self, cfg: MuonConfig, rows: Iterable[Row], masters: Mapping[str, Tensor], shards: Shards):
        self.cfg, self.shards = cfg, shards
        trained = {row.name: row for row in rows}
        self.rows = {name: row for name, row in trained.items() if name in masters}
        self.momentum = {name: torch.zeros_like(masters[name]) for name in self.rows}

        runs = {n: runs_of(row, shards[n].parameter.shape, shards.tensor_size) for n, row in trained.items()}
        self.exchanges = plan({n: shards[n] for n in trained}, runs)
        owned = [m for exchange in self.exchanges for m in exchange.owned]
        # what this rank orthogonalises of a parameter, and where that begins in the report
        self._held: dict[str, list[tuple[Run, int]]] = {}
        self._owned: dict[CutMatrix, int] = {}
        self._reported: dict[str, int] = {}
        for name in self.rows:
            self._lay_out(name, runs[name], [m for m in owned if m.name == name])

    def _lay_out(self, name: str, runs: list[Run], owned: list[CutMatrix]) -> None:
        shard = self.shards[name]
        found: list[tuple[tuple[int, int], Run | CutMatrix, int]] = [(m.place, m, 1) for m in owned]
        for number, run in enumerate(runs):
            low, high = run.within(shard.start, shard.stop)
            if low < high:
                found.append(((number, low), run.part(low, high, shard.start), high - low))
        self._held[name], first = [], 0
        for _, what, count in sorted(found, key=lambda entry: entry[0]):
            if isinstance(what, Run):
                self._held[name].append((what, first))
            else:
                self._owned[what] = first
            first += count
        self._reported[name] = first

    @torch.no_grad()
    def step(
        self, masters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], *, lr: float, decay: float, scale: float
    ) -> dict[str, Tensor]:
        """Updates `masters` in place. lr: of this step; decay: the weight decay; scale: multiplies every gradient (clipping).

        Returns, for each parameter of which this rank orthogonalised anything, the RMS of those blocks' changes without their
        weight decay (about 0.2 lr), in the order of the card's parts, then of heads or experts: all [blocks] of a parameter
        that lies whole here, else those whole in this rank's part and those it owns. Parameters without an entry in
        `gradients` are left as they are. A block whose gradients have all been zero is changed by the weight decay alone.
        """
        names = [name for name in self.rows if name in gradients]
        dials = _Dials(lr, decay, scale)
        gradients = {n: gradients[n].contiguous() for n in names}
        if names:
            momenta = [self.momentum[n] for n in names]
            torch._foreach_mul_(momenta, self.cfg.momentum)
            torch._foreach_add_(momenta, [gradients[n].to(m.dtype) for n, m in zip(names, momenta)], alpha=scale)

        report = {n: masters[n].new_zeros(self._reported[n]) for n in names if self._reported[n]}
        wholes = [exchange.to_owners(self._pieces(exchange, gradients, dials)) for exchange in self.exchanges]
        by_shape: dict[tuple[object, ...], list[_Piece]] = {}
        for piece in (*self._held_pieces(names, masters, gradients, report), *self._owned_pieces(wholes, report)):
            m = piece.matrices
            by_shape.setdefault((self._cut(piece.row), *m.shape[1:], m.dtype, m.device), []).append(piece)
        for pieces in by_shape.values():
            cut = self._cut(pieces[0].row)
            for batch in _batches(pieces, 1 if cut is None else self.shards.tensor_size):
                self._update(batch, cut, dials)
        for exchange, matrices in zip(self.exchanges, wholes):
            for matrix, change in zip(exchange.held, exchange.to_holders(matrices)):
                row = self.rows[matrix.name]
                size = self._size(row, matrix.rows, matrix.cols)
                self._apply(row, self._part(matrix, masters[matrix.name]), change, size, dials)
        return report

    def _cut(self, row: Row) -> int | None:
        """The axis along which tensor ranks have to put together each matrix of the parameter."""
        return row.tensor_cut if self.shards.tensor_size > 1 else None

    def _held_pieces(
        self, names: list[str], masters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], report: Mapping[str, Tensor]
    ) -> Iterator[_Piece]:
        for name in names:
            for run, first in self._held[name]:
                weight, momentum, gradient = (run.views(t) for t in (masters[name], self.momentum[name], gradients[name]))
                yield _Held(self.rows[name], weight, momentum, gradient, report[name][first : first + run.count])

    def _owned_pieces(self, wholes: list[list[Tensor]], report: Mapping[str, Tensor]) -> Iterator[_Piece]:
        for exchange, tensors in zip(self.exchanges, wholes):
            for matrix, whole in zip(exchange.owned, tensors):
                first = self._owned[matrix]
                space = report[matrix.name][first : first + 1]
                yield _Owned(self.rows[matrix.name], whole.view(1, matrix.rows, matrix.cols), space)

    def _part(self, matrix: CutMatrix, tensor: Tensor) -> Tensor:
        """This rank's piece of a cut matrix, a view of its part [stop - start] of the parameter."""
        shard = self.shards[matrix.name]
        start, stop = (matrix.first + edge - shard.start for edge in matrix.pieces[shard.rank])
        return tensor[start:stop]

    def _pieces(self, exchange: Exchange, gradients: Mapping[str, Tensor], dials: _Dials) -> list[Tensor]:
        pieces = []
        for matrix in exchange.held:
            momentum = self._part(matrix, self.momentum[matrix.name])
            pieces.append(torch.empty_like(momentum))
            self._input(momentum, self._part(matrix, gradients[matrix.name]), dials, out=pieces[-1])
        return pieces

    def _input(self, momentum: Tensor, gradient: Tensor, dials: _Dials, *, out: Tensor) -> None:
        """What Newton-Schulz orthogonalises, element by element."""
        if self.cfg.nesterov:
            torch.mul(momentum, self.cfg.momentum, out=out)
            out.add_(gradient, alpha=dials.scale)
        else:
            out.copy_(momentum)

    def _apply(self, row: Row, weight: Tensor, change: Tensor, size: float, dials: _Dials) -> None:
        rate = dials.lr * row.lr_scale
        if row.decay:
            weight.mul_(1 - rate * dials.decay)
        weight.add_(change, alpha=-rate * size)

    def _size(self, row: Row, rows: int, cols: int) -> float:
        """Of the update of a logical matrix of which this tensor rank has [rows, cols].

        The matrix's own sides count: with those of all heads together, each head would get too large an update.
        """
        sides = [rows, cols]
        if (cut := self._cut(row)) is not None:
            sides[cut] *= self.shards.tensor_size
        return self.cfg.scale * math.sqrt(max(sides))

    def _update(self, batch: list[_Piece], cut: int | None, dials: _Dials) -> None:
        sizes, sides = [len(p.matrices) for p in batch], batch[0].matrices.shape[1:]
        size = self._size(batch[0].row, *sides)
        stacked = batch[0].matrices.new_empty(sum(sizes), *sides)
        for piece, space in zip(batch, stacked.split(sizes)):
            if isinstance(piece, _Held):
                self._input(piece.momentum, piece.gradient, dials, out=space)
            else:
                space.copy_(piece.matrices)
        if cut is not None:
            stacked = torch.cat(self.shards.over_tensor_ranks(stacked).unbind(), dim=1 + cut)
        precision = torch.bfloat16 if self.cfg.precision is MuonPrecision.bf16 else None
        update = orthogonalise(stacked, steps=self.cfg.steps, coefficients=self.cfg.coefficients.value, precision=precision)
        rms = torch.linalg.vector_norm(update, dim=(-2, -1)) * (size / math.sqrt(update.shape[1] * update.shape[2]))
        if cut is not None:
            update = update.chunk(self.shards.tensor_size, dim=1 + cut)[self.shards.tensor_rank]
        for piece, change, change_rms in zip(batch, update.split(sizes), rms.split(sizes)):
            if isinstance(piece, _Held):
                self._apply(piece.row, piece.weight, change, size, dials)
            else:
                piece.matrices.copy_(change)
            torch.mul(change_rms, dials.lr * piece.row.lr_scale, out=piece.rms)


def _batches(pieces: list[_Piece], tensor_size: int) -> Iterator[list[_Piece]]:
    """Runs of at most `default_chunk` elements (at least one matrix), so that no copy of a whole model is ever made.

    tensor_size: of how many pieces like these each matrix is put together before it is worked on.
    """
    rows, cols = pieces[0].matrices.shape[1:]
    limit = max(1, default_chunk(pieces[0].matrices.device) // (rows * cols * tensor_size))
    batch: list[_Piece] = []
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
