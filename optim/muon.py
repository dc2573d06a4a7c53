"""Per-Head Muon: momentum, then Newton-Schulz on every logical matrix by itself (report 2.5, recipe inherited from K2).

One joint orthogonalisation of all heads lets heads with a large momentum take the whole update; by itself each head gets the
same. The cards say where the heads, the fused gate and up, and the experts lie.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.newton_schulz import default_chunk, orthogonalise
from optim.config import MuonConfig, MuonPrecision
from optim.table import Row


@dataclass
class _Piece:
    """A run of same-shaped blocks of one parameter: views [n, rows, cols] of its tensors and its place in the report."""

    row: Row
    weight: Tensor
    momentum: Tensor
    gradient: Tensor
    rms: Tensor  # [n], filled here

    def cut(self, first: int, last: int) -> _Piece:
        weight, momentum, gradient, rms = (t[first:last] for t in (self.weight, self.momentum, self.gradient, self.rms))
        return _Piece(self.row, weight, momentum, gradient, rms)


class Muon:
    """Momenta of the given parameters and their update."""

    def __init__(self, cfg: MuonConfig, rows: Iterable[Row], masters: Mapping[str, Tensor]):
        self.cfg = cfg
        self.rows = {row.name: row for row in rows}
        self.momentum = {name: torch.zeros_like(masters[name]) for name in self.rows}

    @torch.no_grad()
    def step(
        self, masters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], *, lr: float, decay: float, scale: float
    ) -> dict[str, Tensor]:
        """Updates `masters` in place. lr: of this step; decay: the weight decay; scale: multiplies every gradient (clipping).

        Returns, for each updated parameter, the RMS of every block's change without its weight decay (about 0.2 lr), [blocks]
        in the order of `blocks_of`. Parameters without an entry in `gradients` are left as they are. A block whose gradients
        have all been zero is changed by the weight decay alone.
        """
        names = [name for name in self.rows if name in gradients]
        if not names:
            return {}
        momenta = [self.momentum[n] for n in names]
        torch._foreach_mul_(momenta, self.cfg.momentum)
        torch._foreach_add_(momenta, [gradients[n].to(m.dtype) for n, m in zip(names, momenta)], alpha=scale)

        report: dict[str, Tensor] = {}
        by_shape: dict[tuple[object, ...], list[_Piece]] = {}
        for name in names:
            row, weight = self.rows[name], masters[name]
            parts = list(
                zip(blocks_of(row, weight), blocks_of(row, self.momentum[name]), blocks_of(row, gradients[name].contiguous()))
            )
            report[name] = torch.zeros(sum(len(w) for w, _, _ in parts), dtype=weight.dtype, device=weight.device)
            spaces = report[name].split([len(w) for w, _, _ in parts])
            for (w, m, g), space in zip(parts, spaces):
                key = (*w.shape[1:], w.dtype, w.device)
                by_shape.setdefault(key, []).append(_Piece(row, w, m, g, space))
        for pieces in by_shape.values():
            for batch in _batches(pieces):
                self._update(batch, lr, decay, scale)
        return report

    def _update(self, batch: list[_Piece], lr: float, decay: float, scale: float) -> None:
        sizes = [len(p.weight) for p in batch]
        rows, cols = batch[0].weight.shape[1:]
        stacked = batch[0].weight.new_empty(sum(sizes), rows, cols)
        for piece, space in zip(batch, stacked.split(sizes)):
            if self.cfg.nesterov:
                torch.mul(piece.momentum, self.cfg.momentum, out=space)
                space.add_(piece.gradient, alpha=scale)
            else:
                space.copy_(piece.momentum)
        precision = torch.bfloat16 if self.cfg.precision is MuonPrecision.bf16 else None
        update = orthogonalise(stacked, steps=self.cfg.steps, coefficients=self.cfg.coefficients.value, precision=precision)
        # the block's own sides: with the whole matrix's, heads would get too large an update
        size = self.cfg.scale * math.sqrt(max(rows, cols))
        rms = torch.linalg.vector_norm(update, dim=(-2, -1)) * (size / math.sqrt(rows * cols))
        for piece, change, change_rms in zip(batch, update.split(sizes), rms.split(sizes)):
            rate = lr * piece.row.lr_scale
            if piece.row.decay:
                piece.weight.mul_(1 - rate * decay)
            piece.weight.add_(change, alpha=-rate * size)
            torch.mul(change_rms, rate, out=piece.rms)


def blocks_of(row: Row, tensor: Tensor) -> list[Tensor]:
    """Views [n, rows, cols] of the matrices that Muon orthogonalises, one list entry a part of the card."""
    views = row.blocks.views(tensor) if row.split else row.blocks.whole(tensor)
    return [view for _, view in views]


def _batches(pieces: list[_Piece]) -> Iterator[list[_Piece]]:
    """Runs of at most `default_chunk` elements (at least one block), so that no copy of a whole model is ever made."""
    rows, cols = pieces[0].weight.shape[1:]
    limit = max(1, default_chunk(pieces[0].weight.device) // (rows * cols))
    batch: list[_Piece] = []
    room = limit
    for piece in pieces:
        first, count = 0, len(piece.weight)
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
