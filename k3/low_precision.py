"""What fp8 and mxfp8 ask of a model's shapes. Free of torch, so that a configuration can be checked without it.

fp8: Transformer Engine's block scaling, one scale for 1 x 128 numbers of an activation and for 128 x 128 of a weight (Hopper).
mxfp8: one scale for 32 numbers, along rows and along columns (Blackwell). Both E4M3, with scales that are powers of two.
Parameters, their gradients and the optimizer stay as in bf16: tensors are quantised when they enter a product.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum

from parallel.cards import Card, Group, TensorAxis


class LowPrecision(Enum):
    fp8 = "fp8"
    mxfp8 = "mxfp8"

    @property
    def grid(self) -> int:
        """Every axis of a product, batch included, is a multiple of it."""
        return 32 if self is LowPrecision.mxfp8 else 16


def off_grid(cards: Iterable[Card], kind: LowPrecision, tp: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, its matrix on one of `tp` tensor ranks) of every low-precision matrix that does not lie on the grid."""
    for card in cards:
        if not card.low_precision or not card.blocks.is_matrix:
            continue
        rows, cols = card.shape[-2:]
        if card.placement.group is Group.DENSE and card.placement.tensor is TensorAxis.ROWS:
            rows //= tp
        elif card.placement.group is Group.DENSE and card.placement.tensor is TensorAxis.COLS:
            cols //= tp
        if rows % kind.grid or cols % kind.grid:
            yield card.name, (rows, cols)
