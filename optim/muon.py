"""Per-Head Muon: momentum, then Newton-Schulz on every logical matrix by itself (report 2.5, recipe inherited from K2).

One joint orthogonalisation of all heads lets heads with a large momentum take the whole update; by itself each head gets the
same. The cards say where the heads, the fused gate and up, and the experts lie.

Momentum, weight decay and the change of the weights are elementwise, on this rank's part of each parameter. Newton-Schulz needs
whole matrices. Of one that ZeRO's cut divides, the owner gets all pieces (`optim/owners.py`); those of the next gradient bucket
are on their way while the matrices of one are worked on. One that tensor ranks cut is gathered and orthogonalised on all of
them, and each keeps its own rows or columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor

from kernels.newton_schulz import orthogonalise
from optim.batches import Held, Owned, Piece, batches
from optim.config import MuonConfig, MuonPrecision
from optim.exchange import Matrix, Pending, Route
from optim.home import Home
from optim.matrices import Run, runs_of
from optim.owners import measured, plan
from optim.table import Row
from optim.work import flops
from parallel.shards import Shards


@dataclass(frozen=True)
class _Dials:
    """Of one step; `scale` multiplies every gradient."""

    lr: float
    decay: float
    scale: float


@dataclass
class _Work:
    """What is orthogonalised together: matrices that lie whole in this rank's part, and those that it owns of one bucket."""

    route: Route | None
    held: list[tuple[str, Run, int]]  # (parameter, matrices in this rank's part of it, where they begin in the report)


class Muon:
    """Momenta of the given parameters and their update. `masters` holds this rank's parts, as `shards` says.

    Every rank must make one, and take every step.
    """

    def __init__(self, cfg: MuonConfig, rows: Iterable[Row], masters: Mapping[str, Tensor], shards: Shards, home: Home):
        self.cfg, self.shards, self.home = cfg, shards, home
        self.rows = {row.name: row for row in rows}
        self.momentum = {name: home.zeros_like(masters[name]) for name in self.rows if name in masters}

        runs = {n: runs_of(row, shards[n].parameter.shape, shards.tensor_size) for n, row in self.rows.items()}
        self.plan = plan({n: shards[n] for n in self.rows}, runs, self._flops, cfg.distribution)
        # what this rank orthogonalises of a parameter, and where that begins in the report
        self._owned: dict[Matrix, int] = {}
        self._reported: dict[str, int] = {}
        self.blocks: dict[str, list[int]] = {}  # which blocks of the whole parameter those are, in the order of its card
        alone = _Work(None, [])  # buckets without a route are worked on together, in larger batches
        self._work = [alone, *(_Work(route, []) for route in self.plan.routes.values())]
        of_bucket = dict(zip(self.plan.routes, self._work[1:]))
        held, owned = (_by_name(getattr(route, what) for route in self.plan.routes.values()) for what in ("held", "owned"))
        for name in self.rows:
            work = of_bucket.get(shards[name].bucket, alone)
            self._lay_out(name, runs[name], held.get(name, []), owned.get(name, []), work.held)

        self.balance = measured(self.plan, shards, shards.device) if self.plan.matrices else None

    def _lay_out(
        self, name: str, runs: list[Run], moving: list[Matrix], owned: list[Matrix], held: list[tuple[str, Run, int]]
    ) -> None:
        shard = self.shards[name]
        found: list[tuple[tuple[int, int], Run | Matrix, int]] = [(m.place, m, 1) for m in owned]
        for number, run in enumerate(runs):
            low, high = run.within(shard.start, shard.stop)
            leaving = sorted(m.place[1] for m in moving if m.place[0] == number and low <= m.place[1] < high)
            for start, stop in pairwise([low - 1, *leaving, high]):
                if start + 1 < stop:
                    found.append(((number, start + 1), run.part(start + 1, stop, shard.start), stop - start - 1))
        ranks, rank = self._spread(name)
        before = [0, *accumulate(ranks * run.count for run in runs)]
        first, blocks = 0, self.blocks.setdefault(name, [])
        for (number, index), what, count in sorted(found, key=lambda entry: entry[0]):
            if isinstance(what, Run):
                held.append((name, what, first))
            else:
                self._owned[what] = first
            first += count
            blocks += range(begin := before[number] + rank * runs[number].count + index, begin + count)
        self._reported[name] = first

    def _spread(self, name: str) -> tuple[int, int]:
        """(how many ranks the parameter's matrices are spread over, as many of every part on each, this rank's number)"""
        row = self.rows[name]
        if self.shards[name].parameter.numel() == math.prod(row.shape) or self._cut(row) is not None:
            return 1, 0
        return self.shards.expert_place if row.blocks.per_expert else (self.shards.tensor_size, self.shards.tensor_rank)

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
        dials = _Dials(lr, decay, scale)
        gradients = {n: gradients[n].contiguous() for n in self.momentum if n in gradients}
        report = {n: self._space_for_report(n) for n, count in self._reported.items() if count}
        fetch, returning = self._fetch(self._work[0], gradients, dials), _nothing
        for number, work in enumerate(self._work):
            later = self._work[number + 1 : number + 2]
            following = self._fetch(later[0], gradients, dials) if later else None
            self._orthogonalise(self._held_pieces(work, masters, gradients, report), dials)
            if work.route is not None and fetch is not None:
                wholes = fetch.wait()
                self._orthogonalise(self._owned_pieces(work.route, wholes, report), dials)
                returning()
                returning = partial(self._finish, work.route, work.route.to_holders(wholes), masters, dials)
                del wholes
            fetch = following
        returning()
        return {n: rms for n, rms in report.items() if n in gradients or n not in masters}

    def _fetch(self, work: _Work, gradients: Mapping[str, Tensor], dials: _Dials) -> Pending | None:
        """Starts to bring the bucket's moving matrices to their owners."""
        if work.route is None:
            return None
        space = work.route.space()
        for matrix, piece in zip(work.route.held, space.pieces):
            momentum, gradient = (self._part(matrix, of[matrix.name]) for of in (self.momentum, gradients))
            self._advance(momentum, gradient, dials, out=piece)
        return work.route.to_owners(space)

    def _finish(self, route: Route, returning: Pending, masters: Mapping[str, Tensor], dials: _Dials) -> None:
        """Applies the updates of the bucket's moving matrices."""
        arriving = [self.home.bring(change) for change in returning.wait()]
        for matrix, change in zip(route.held, arriving):
            row = self.rows[matrix.name]
            size = self._size(row, matrix.rows, matrix.cols)
            self._apply(row, self._part(matrix, masters[matrix.name]), change(), size, dials)

    def _orthogonalise(self, pieces: Iterable[Piece], dials: _Dials) -> None:
        by_shape: dict[tuple[object, ...], list[Piece]] = {}
        for piece in pieces:
            m = piece.matrices
            by_shape.setdefault((self._cut(piece.row), *m.shape[1:], m.dtype, m.device), []).append(piece)
        finish = _nothing
        for same in by_shape.values():
            cut = self._cut(same[0].row)
            for batch in batches(same, 1 if cut is None else self.shards.tensor_size):
                following = self._update(batch, cut, dials)
                if self.home.offloaded:  # one batch is applied while the device works on the next
                    finish()
                    finish = following
                else:
                    following()
        finish()

    def _space_for_report(self, name: str) -> Tensor:
        like = self.shards[name].parameter
        dtype = torch.float32 if like.dtype == torch.bfloat16 else like.dtype
        return torch.zeros(self._reported[name], dtype=dtype, device=like.device)

    def _cut(self, row: Row) -> int | None:
        """The axis along which tensor ranks have to put together each matrix of the parameter."""
        return row.tensor_cut if self.shards.tensor_size > 1 else None

    def _held_pieces(
        self, work: _Work, masters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], report: Mapping[str, Tensor]
    ) -> Iterator[Piece]:
        for name, run, first in work.held:
            if name in gradients:
                weight, momentum, gradient = (run.views(t) for t in (masters[name], self.momentum[name], gradients[name]))
                yield Held(self.rows[name], weight, momentum, gradient, report[name][first : first + run.count])

    def _owned_pieces(self, route: Route, wholes: Sequence[Tensor], report: Mapping[str, Tensor]) -> Iterator[Piece]:
        for matrix, whole in zip(route.owned, wholes):
            first = self._owned[matrix]
            space = report[matrix.name][first : first + 1]
            yield Owned(self.rows[matrix.name], whole.view(1, matrix.rows, matrix.cols), space)

    def _part(self, matrix: Matrix, tensor: Tensor) -> Tensor:
        """This rank's piece of a moving matrix, a flat view of its part of the parameter."""
        shard = self.shards[matrix.name]
        start, stop = (matrix.first + edge - shard.start for edge in matrix.span(shard.rank))
        return tensor.view(-1)[start:stop]

    def _advance(self, momentum: Tensor, gradient: Tensor, dials: _Dials, *, out: Tensor) -> None:
        """The momentum of this step, and what Newton-Schulz orthogonalises into `out`; element by element, at home."""
        gradient = self.home.bring(gradient)().to(momentum.dtype)
        momentum.mul_(self.cfg.momentum).add_(gradient, alpha=dials.scale)
        if not self.cfg.nesterov:
            out.copy_(momentum, non_blocking=True)
            return
        here = out if out.device == momentum.device else self.home.empty_like(momentum)
        torch.mul(momentum, self.cfg.momentum, out=here)
        here.add_(gradient, alpha=dials.scale)
        if here is not out:
            out.copy_(here, non_blocking=True)

    def _apply(self, row: Row, weight: Tensor, change: Tensor, size: float, dials: _Dials) -> None:
        rate = dials.lr * row.lr_scale
        if row.decay:
            weight.mul_(1 - rate * dials.decay)
        weight.add_(change, alpha=-rate * size)

    def _size(self, row: Row, rows: int, cols: int) -> float:
        """Of the update of a logical matrix of which this tensor rank has [rows, cols].

        The matrix's own sides count: with those of all heads together, each head would get too large an update.
        """
        return self.cfg.scale * math.sqrt(max(self._sides(row, rows, cols)))

    def _sides(self, row: Row, rows: int, cols: int) -> list[int]:
        sides = [rows, cols]
        if (cut := self._cut(row)) is not None:
            sides[cut] *= self.shards.tensor_size
        return sides

    def _flops(self, name: str, run: Run) -> int:
        return flops(*self._sides(self.rows[name], run.rows, run.cols))

    def _update(self, batch: list[Piece], cut: int | None, dials: _Dials) -> Callable[[], None]:
        """Orthogonalises the matrices; what is returned changes the weights of those that are held."""
        sizes, sides = [len(p.matrices) for p in batch], batch[0].matrices.shape[1:]
        size = self._size(batch[0].row, *sides)
        stacked = torch.empty(sum(sizes), *sides, dtype=batch[0].matrices.dtype, device=self.shards.device)
        for piece, space in zip(batch, stacked.split(sizes)):
            if isinstance(piece, Held):
                self._advance(piece.momentum, piece.gradient, dials, out=space)
            else:
                space.copy_(piece.matrices)
        if cut is not None:
            stacked = torch.cat(self.shards.over_tensor_ranks(stacked).unbind(), dim=1 + cut)
        precision = torch.bfloat16 if self.cfg.precision is MuonPrecision.bf16 else None
        update = orthogonalise(stacked, steps=self.cfg.steps, coefficients=self.cfg.coefficients.value, precision=precision)
        rms = torch.linalg.vector_norm(update, dim=(-2, -1)) * (size / math.sqrt(update.shape[1] * update.shape[2]))
        if cut is not None:
            update = update.chunk(self.shards.tensor_size, dim=1 + cut)[self.shards.tensor_rank]
        held = []
        for piece, change, change_rms in zip(batch, update.split(sizes), rms.split(sizes)):
            torch.mul(change_rms, dials.lr * piece.row.lr_scale, out=piece.rms)
            if isinstance(piece, Held):
                held.append((piece, self.home.bring(change)))
            else:
                piece.matrices.copy_(change)

        def apply() -> None:
            for piece, arrived in held:
                self._apply(piece.row, piece.weight, arrived(), size, dials)

        return apply


def _by_name(lists: Iterable[Sequence[Matrix]]) -> dict[str, list[Matrix]]:
    out: dict[str, list[Matrix]] = {}
    for matrix in chain.from_iterable(lists):
        out.setdefault(matrix.name, []).append(matrix)
    return out


def _nothing() -> None:
    pass
