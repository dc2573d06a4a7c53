"""Which optimizer trains which parameter: read from the cards and the dials, printed at the start, and never incomplete."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from optim.config import OptimConfig, OptimizerName, RouterOptimizer
from parallel.cards import Blocks, Card, CardError, CardTable, Optimizer, TensorAxis


@dataclass(frozen=True)
class Row:
    """One parameter's assignment. `split` says whether Muon takes the card's blocks apart or whole matrices."""

    name: str
    shape: tuple[int, ...]  # global
    optimizer: Optimizer  # MUON or ADAMW
    blocks: Blocks
    split: bool
    lr_scale: float  # times optim.lr
    decay: bool
    tensor_cut: (
        int | None
    )  # the axis (0 rows, 1 columns) along which tensor parallelism cuts each matrix; None: it leaves them whole

    def describe_blocks(self) -> str:
        if self.optimizer is Optimizer.ADAMW:
            return "-"
        return self.blocks.describe() if self.split else "whole"


class Table:
    """The rows of every trained parameter, in the model's order."""

    def __init__(self, rows: list[Row]):
        self._rows = {row.name: row for row in rows}

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, name: str) -> Row:
        return self._rows[name]

    def of(self, optimizer: Optimizer) -> list[Row]:
        return [row for row in self if row.optimizer is optimizer]

    def describe(self) -> str:
        """A printable table. Parameters that differ only by the numbers in their names (layers) share a line."""
        families: dict[tuple[str, ...], int] = {}
        for row in self:
            family = re.sub(r"(?<=\.)\d+(?=\.)", "*", row.name)
            size, decays = "×".join(str(n) for n in row.shape), "yes" if row.decay else "no"
            key = (family, size, row.optimizer.value, row.describe_blocks(), f"×{row.lr_scale:g}", decays)
            families[key] = families.get(key, 0) + 1
        lines = [("parameter", "count", "shape", "optimizer", "blocks", "lr", "decay")]
        for (family, size, name, blocks, scale, decays), count in families.items():
            lines.append((family, str(count), size, name, blocks, scale, decays))
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
        for optimizer in (Optimizer.MUON, Optimizer.ADAMW):
            rows = self.of(optimizer)
            elements = sum(math.prod(row.shape) for row in rows)
            text.append(f"{optimizer.value}: {len(rows)} parameters, {elements:,} elements")
        return "\n".join(text)


def assign(cards: CardTable, cfg: OptimConfig) -> Table:
    """The assignment of every trained parameter of `cards` (report 2.5).

    `cfg.name=adamw` sends all of them to AdamW; the router follows `cfg.router`. Raises CardError where a parameter ends up
    unassigned (a card that says Muon without logical matrices) or assigned twice (one tensor under two names).
    """
    if cfg.name is OptimizerName.adamw and cfg.router.optimizer is RouterOptimizer.muon:
        raise ValueError("optim.router.optimizer=muon contradicts optim.name=adamw; leave it at adamw or set optim.name=muon")
    rows: list[Row] = []
    names_of: dict[int, str] = {}
    for card, parameter in cards.trained():
        other = names_of.setdefault(id(parameter), card.name)
        if other != card.name:
            raise CardError(f"one parameter is assigned twice, as {other} and as {card.name}; give it one card")
        rows.append(assigned(card, cfg))
    return Table(rows)


def assigned(card: Card, cfg: OptimConfig) -> Row:
    """The assignment of one parameter. Raises CardError as `assign` does."""
    optimizer, scale = card.optimizer, 1.0
    if card.role == "router":
        optimizer, scale = Optimizer(cfg.router.optimizer.value), cfg.router.lr_scale
    if cfg.name is OptimizerName.adamw:
        optimizer = Optimizer.ADAMW
    if optimizer is Optimizer.MUON and not card.blocks.is_matrix:
        raise CardError(
            f"{card.name} is unassigned: Muon needs the logical matrices that its card lacks; give it blocks or AdamW"
        )
    split = cfg.muon.per_head or not card.blocks.per_head
    heads = split and card.blocks.per_head  # go whole to tensor ranks
    cut = {TensorAxis.ROWS: None if heads else 0, TensorAxis.COLS: 1}.get(card.placement.tensor)
    return Row(card.name, card.shape, optimizer, card.blocks, split, scale, card.decay, cut)
