"""Where the logical matrices of a parameter lie among the elements of its flattened tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from optim.table import Row
from parallel.cards import CardError


@dataclass(frozen=True)
class Run:
    """Matrices of one shape in a flattened tensor: number i is elements [first + i * stride, first + i * stride + size)."""

    first: int
    stride: int
    count: int
    rows: int
    cols: int

    @property
    def size(self) -> int:
        return self.rows * self.cols

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """[low, high) of the matrices that lie wholly in elements [start, stop)."""
        low = max(0, -((self.first - start) // self.stride))  # rounded up
        return low, max(low, min(self.count, (stop - self.size - self.first) // self.stride + 1))

    def at(self, element: int) -> int | None:
        """The matrix that a cut before `element` would divide."""
        index = (element - self.first) // self.stride
        inside = 0 <= index < self.count and 0 < element - self.first - index * self.stride < self.size
        return index if inside else None

    def part(self, low: int, high: int, start: int) -> Run:
        """The matrices [low, high), as they lie in a tensor that begins at element `start`."""
        return Run(self.first + low * self.stride - start, self.stride, high - low, self.rows, self.cols)

    def views(self, tensor: Tensor) -> Tensor:
        """[count, rows, cols], a view of a contiguous tensor."""
        flat = tensor.view(-1)[self.first : self.first + (self.count - 1) * self.stride + self.size]
        return flat.unfold(0, self.size, self.stride).unflatten(1, (self.rows, self.cols))


def runs_of(row: Row, shape: torch.Size, tensor_size: int) -> list[Run]:
    """The matrices that Muon orthogonalises in a parameter of local `shape`: one entry a part of its card.

    A matrix that is cut over `tensor_size` ranks appears as this rank's piece of it. Raises CardError for matrices whose pieces
    would not be alike on all tensor ranks.
    """
    probe = torch.empty(shape, device="meta")
    cut = row.tensor_cut if tensor_size > 1 else None
    if cut == 0 and row.split and len(row.blocks.parts) > 1:
        raise CardError(f"{row.name}: fused parts cannot be cut by rows over tensor ranks; store them as parameters of their own")
    if cut is not None and row.blocks.per_expert:
        raise CardError(f"{row.name}: experts lie whole on their ranks; they cannot be cut over tensor ranks")
    views = row.blocks.views(probe) if row.split and cut != 0 else row.blocks.whole(probe)
    return [Run(int(v.storage_offset()), v.stride(0), *v.shape) for _, v in views]
