"""Operations of Newton-Schulz, from cards alone. Imports no torch."""

from __future__ import annotations

from optim.config import OptimConfig
from optim.table import assigned
from parallel.cards import Card, Optimizer


def flops(rows: int, cols: int) -> int:
    """Of one Newton-Schulz step: X X^T, its square, and the product with X, on the shorter side."""
    short, long = min(rows, cols), max(rows, cols)
    return 4 * short * short * long + 2 * short**3


def step_flops(card: Card, cfg: OptimConfig) -> int:
    """Of all iterations over all matrices of a parameter, whole on one rank; 0 for what AdamW trains."""
    row = assigned(card, cfg)
    if row.optimizer is not Optimizer.MUON:
        return 0
    *lead, rows, cols = card.shape
    matrices = lead[0] if lead else 1
    if not row.split:
        return cfg.muon.steps * matrices * flops(rows, cols)
    groups = rows // card.blocks.period
    return cfg.muon.steps * matrices * groups * sum(flops(part.rows, cols) for part in card.blocks.parts)
