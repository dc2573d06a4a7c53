"""How a batch [B, T, H, D] lies in chunks, and where documents cut the chunks.

In chunks a tensor is [G, B, H, C, D]: all heads of one chunk are one block, as the serial pass over chunks wants them.
`Layout.view` gives that shape as a view of the caller's tensor, of any strides; `pack` makes a range of chunks contiguous, as
[P, C, D] with P = g B H.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import documents
from kernels.kda.tiles import TILE

# Bytes of one [P, C, D] tensor that a CPU works on at a time: about twenty of them are live and should stay in its cache.
CPU_BLOCK = 512 * 1024


@dataclass(frozen=True)
class Layout:
    """It depends on shapes only, so that no product's shape, and with it no rounding, depends on what tokens hold."""

    batch: int
    length: int
    heads: int
    size: int  # C, tokens in a chunk
    chunks: int  # G
    group: int  # chunks worked on at a time
    math: torch.dtype

    @classmethod
    def of(cls, q: Tensor, v: Tensor, largest: int) -> Layout:
        """The layout for q [B, T, H, K], v [B, T, H, V]; a short sequence takes one smaller chunk."""
        batch, length, heads, width = q.shape
        size = TILE
        while size < min(length, largest):
            size *= 2
        chunks = -(-length // size)
        math = torch.float64 if q.dtype == torch.float64 else torch.float32
        group = chunks
        if q.device.type == "cpu":
            group = max(1, CPU_BLOCK // (batch * heads * size * max(width, v.shape[-1]) * math.itemsize))
        return cls(batch, length, heads, size, chunks, group, math)

    @property
    def n(self) -> int:
        return self.batch * self.heads

    @property
    def padding(self) -> int:
        return self.chunks * self.size - self.length

    def groups(self) -> list[slice]:
        """The ranges of chunks worked on at a time, in order."""
        return [slice(c, min(c + self.group, self.chunks)) for c in range(0, self.chunks, self.group)]

    def view(self, x: Tensor) -> Tensor:
        """x [B, T, H, D] as [G, B, H, C, D]: a view, unless T has to be padded with zeros."""
        if self.padding:
            x = F.pad(x, (0, 0, 0, 0, 0, self.padding))
        return x.unflatten(1, (self.chunks, self.size)).permute(1, 0, 3, 2, 4)

    def pack(self, view: Tensor, factor: Tensor | None = None) -> Tensor:
        """A range of chunks [g, B, H, C, D], times a factor that broadcasts, as contiguous [P, C, D] in the math dtype."""
        out = torch.empty(view.shape, dtype=self.math, device=view.device)
        out.copy_(view) if factor is None else torch.mul(view, factor, out=out)
        return out.flatten(0, 2)

    def like(self, x: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """An empty [B, T, H, D] of x's shape, and its [G, B, H, C, D] view (over the padding too) to write to."""
        out = x.new_empty(self.batch, self.chunks * self.size, self.heads, x.shape[-1], dtype=dtype)
        return out[:, : self.length], out.unflatten(1, (self.chunks, self.size)).permute(1, 0, 3, 2, 4)

    def clear_padding(self, x: Tensor, where: slice) -> None:
        """Zeroes the padded tokens in the chunks `where` of x [P, C, D]."""
        if self.padding and where.stop == self.chunks:
            x[-self.n :, self.size - self.padding :] = 0


@dataclass(frozen=True)
class Segments:
    """Masks of a range of chunks in which documents begin. Masking multiplies by 1 or 0: what is kept keeps its bits."""

    heads: int
    pair: Tensor  # [g, B, 1, C, C]: both tokens of the same document
    first: Tensor  # [g, B, 1, C, 1]: before the chunk's first document start, so the incoming state is seen
    last: Tensor  # [g, B, 1, C, 1]: in the chunk's last document, so the outgoing state sees it
    whole: Tensor  # [g, B, 1, 1]: no document starts in the chunk

    def __getitem__(self, chunks: slice) -> Segments:
        return Segments(self.heads, self.pair[chunks], self.first[chunks], self.last[chunks], self.whole[chunks])

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (*self.whole.shape[:2], self.heads))

    def same(self, a: Tensor) -> None:
        """Clears the products of different documents in a [P, C, C], in place."""
        self._split(a).mul_(self.pair)

    def before_first(self, rows: Tensor) -> Tensor:
        return (self._split(rows) * self.first).view_as(rows)

    def of_last(self, ends: Tensor) -> Tensor:
        return (self._split(ends) * self.last).view_as(ends)

    def uncut(self, decay: Tensor) -> Tensor:
        return (self._split(decay) * self.whole).view_as(decay)


def segments(
    document_starts: Tensor | None, layout: Layout, *, continues: bool, device: torch.device
) -> tuple[Segments | None, Tensor]:
    """(masks, or None where no document begins after a row's first token; bool [B]: which rows ignore an initial state)."""
    starts_BT = documents.resolve(document_starts, layout.batch, layout.length, continues=continues, device=device)
    fresh_B = starts_BT[:, 0]
    if document_starts is None or not bool(starts_BT[:, 1:].any()):
        return None, fresh_B
    starts_GBC = F.pad(starts_BT, (0, layout.padding)).unflatten(1, (layout.chunks, layout.size)).transpose(0, 1)
    number = starts_GBC.long().cumsum(-1)
    last = number[..., -1:]
    pair = number[..., :, None] == number[..., None, :]
    return Segments(
        layout.heads,
        pair[:, :, None].to(layout.math),
        (number == 0)[:, :, None, :, None].to(layout.math),
        (number == last)[:, :, None, :, None].to(layout.math),
        (last == 0)[:, :, None].to(layout.math),
    ), fresh_B
