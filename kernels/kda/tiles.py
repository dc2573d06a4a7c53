"""What happens inside a chunk: decayed queries and keys, and their causal products, with the backward pass (spec 2.5).

With G the running sum of the log-decay g from the chunk's start, a chunk needs
    rows_q = q exp(G)    rows_k = k exp(G)    ends = k exp(G_last - G)    decay = exp(G_last)
    a_q[i, j] = sum_K q_i k_j exp(G_i - G_j) for j <= i        a_k likewise with k_i, for j < i
The chunk is cut into tiles of 16 tokens. Tiles of equal size are joined pairwise until one is left, each product between the two
halves anchored at their border, so that no exponent there is positive. On the diagonal:
  dense    (bounded gate): exp(G_i) and exp(-G_j), from the tile's start, are both representable (|g| <= 5), a plain product.
  pairwise (softplus gate): exp(G_i - G_j) for each pair, the difference summed directly and at most 0.
All anchors precede the row they serve: later tokens cannot change an earlier result, not even in its rounding.

Gradients of g: exp(G_i - G_j) holds every g_t with j < t <= i. With dG_i = q_i dq_i + k_i (dk_i as a row - dk_i as a column),
dg_t would be the sum of dG_i over i >= t, but there the pairs on one side of t cancel and take most digits with them (with strong
decay nearly all: the pairs i = j dominate). So the backward pass follows the anchors. Where two halves are joined, rows of the
second are decayed by the first's whole sum of g, and ends of the first by the second's. With d_sum the gradient of a part's sum,
    d_sum(first) = d_sum(joined) + what rows d_rows sums to over the second half
    d_sum(second) = d_sum(joined) + what ends d_ends sums to over the first half
and in a tile rows pass to the g_t with t <= i, ends to those with t > j. Of the pairs in one tile, dense takes the cancelling sum
without those of i = j, over 16 tokens at most; pairwise sums each product with j < t <= i.

Shapes: P chunks (of all heads and rows), C tokens in a chunk, n tiles, m tokens in a tile or half, K channels of keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.kda.inverse import diagonal_blocks, off_diagonal_blocks

TILE = 16
# Exact powers of two that keep factors of up to exp(80) and small gradients inside float32's range in the backward pass.
SHIFT = 2.0**54
LOG2_E = 1.4426950408889634


@dataclass
class Level:
    """One joining of pairs of halves of m tokens."""

    half: int
    rows_q: Tensor  # [P C/2m, m, K]: the second halves, decayed from the border
    rows_k: Tensor
    ends: Tensor  # [P C/2m, m, K]: keys of the first halves, decayed to the border
    row_factor: Tensor  # [P, C/2m, 2, 1, K]: what joining multiplied rows by
    end_factor: Tensor


@dataclass
class Tiles:
    q: Tensor  # [P, C, K]
    k: Tensor
    rows_q: Tensor  # [P, C, K]
    rows_k: Tensor
    ends: Tensor
    decay: Tensor  # [P, K]
    a_q: Tensor  # [P, C, C], lower triangular
    a_k: Tensor  # [P, C, C], strictly lower triangular
    diagonal: Dense | Pairwise
    levels: list[Level] = field(default_factory=list)


def forward(q: Tensor, k: Tensor, g: Tensor, *, dense: bool) -> Tiles:
    """q, k and log-decay g [P, C, K], contiguous, C = 16 times a power of two. No autograd: see `backward`."""
    count, size, width = q.shape
    diagonal = Dense(q, k, g) if dense else Pairwise(q, k, g)
    a_q, a_k = q.new_zeros(count, size, size), q.new_zeros(count, size, size)
    diagonal_blocks(a_q, TILE).copy_(diagonal.a_q)
    diagonal_blocks(a_k, TILE).copy_(diagonal.a_k)
    rows_q, rows_k, ends, decay = diagonal.rows_q, diagonal.rows_k, diagonal.ends, diagonal.decay
    levels = []
    half = TILE
    while half < size:
        pairs = size // (2 * half)
        first, second = decay.view(count, pairs, 2, width).unbind(2)
        one = torch.ones_like(first)
        level = Level(
            half, _half(rows_q, half, 1), _half(rows_k, half, 1), _half(ends, half, 0),
            torch.stack([one, first], 2).unsqueeze(3), torch.stack([second, one], 2).unsqueeze(3),
        )  # fmt: skip
        keys = level.ends.transpose(1, 2)
        off_diagonal_blocks(a_q, half).copy_(torch.bmm(level.rows_q, keys).view(count, pairs, half, half))
        off_diagonal_blocks(a_k, half).copy_(torch.bmm(level.rows_k, keys).view(count, pairs, half, half))
        rows_q, rows_k = _scaled(rows_q, level.row_factor, half), _scaled(rows_k, level.row_factor, half)
        ends, decay = _scaled(ends, level.end_factor, half), first * second
        levels.append(level)
        half *= 2
    return Tiles(q, k, rows_q, rows_k, ends, decay.view(count, width), a_q, a_k, diagonal, levels)


def backward(
    tiles: Tiles, d_rows_q: Tensor, d_rows_k: Tensor, d_ends: Tensor, d_decay: Tensor, d_a_q: Tensor, d_a_k: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dg), each [P, C, K], from the gradients of what `forward` made; the arguments may be overwritten.

    `d_a_q` and `d_a_k` must be zero above (and for `d_a_k` on) the diagonal.
    """
    d_sum = tiles.decay * d_decay  # [parts, K]: the gradient of a part's sum of g; parts are the chunks, at last the tiles
    for level in reversed(tiles.levels):
        half = level.half
        for d_rows in (d_rows_q, d_rows_k):
            _view(d_rows, half).mul_(level.row_factor)
        _view(d_ends, half).mul_(level.end_factor)
        second_q, second_k, first = _half(d_rows_q, half, 1), _half(d_rows_k, half, 1), _half(d_ends, half, 0)
        over_first = torch.mul(level.rows_q, second_q).addcmul_(level.rows_k, second_k).sum(1)
        over_second = torch.mul(level.ends, first).sum(1)
        d_sum = torch.stack([over_first, over_second], 1).add_(d_sum[:, None]).flatten(0, 1)
        d_q, d_k = (off_diagonal_blocks(d, half).reshape(-1, half, half) for d in (d_a_q, d_a_k))
        second_q.add_(torch.bmm(d_q, level.ends))
        second_k.add_(torch.bmm(d_k, level.ends))
        first.add_(torch.bmm(d_q.transpose(1, 2), level.rows_q).baddbmm_(d_k.transpose(1, 2), level.rows_k))
    flat = (-1, TILE, tiles.q.shape[2])
    d_rows_q, d_rows_k, d_ends = (d.view(flat) for d in (d_rows_q, d_rows_k, d_ends))
    d_a_q, d_a_k = (diagonal_blocks(d, TILE).reshape(-1, TILE, TILE) for d in (d_a_q, d_a_k))
    dq, dk, dg = tiles.diagonal.backward(d_rows_q, d_rows_k, d_ends, d_sum, d_a_q, d_a_k)
    return dq.view_as(tiles.q), dk.view_as(tiles.q), dg.view_as(tiles.q)


class Dense:
    """Diagonal tiles as dense products. Needs g >= -5: exp(80) and exp(-80) are inside float32's range (report 2.1.1)."""

    def __init__(self, q: Tensor, k: Tensor, g: Tensor):
        size, width = q.shape[1], q.shape[2]
        flat = (-1, TILE, width)
        self._q, self._k = q.view(flat), k.view(flat)
        # running sums of g in units of log 2, by a product: exp2 is far cheaper than exp on a CPU
        sums = torch.bmm((ones_below(TILE, g) * LOG2_E).expand(g.shape[0] * size // TILE, TILE, TILE), g.view(flat))
        self.factor = sums.exp2_()  # [P n, m, K]
        self.last = self.factor[:, -1:]
        self.inverse = self._k / self.factor
        self.rows_q, self.rows_k = (torch.mul(x, self.factor) for x in (self._q, self._k))
        keys = self.inverse.transpose(1, 2)
        self.a_q = torch.bmm(self.rows_q, keys).mul_(ones_below(TILE, q)).view(q.shape[0], -1, TILE, TILE)
        self.a_k = torch.bmm(self.rows_k, keys).mul_(ones_below(TILE, q, diagonal=-1)).view_as(self.a_q)
        self._tile_q, self._tile_k = self.rows_q, self.rows_k
        self.ends = (self.inverse * self.last).view_as(q)
        self.rows_q, self.rows_k = self.rows_q.view_as(q), self.rows_k.view_as(q)
        self.decay = self.last.reshape(q.shape[0], -1, width)

    def backward(
        self, d_rows_q: Tensor, d_rows_k: Tensor, d_ends: Tensor, d_sum: Tensor, d_a_q: Tensor, d_a_k: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dg), each [P n, m, K] as d_rows and d_ends; d_sum [P n, K], d_a [P n, m, m]. Overwrites its arguments."""
        alone = d_a_q.diagonal(dim1=1, dim2=2).unsqueeze(2).clone()  # a token with itself: no decay, it would only round dg
        d_a_q.diagonal(dim1=1, dim2=2).zero_()
        up = self.factor * SHIFT
        d_keys = torch.bmm((d_a_q * SHIFT).transpose(1, 2), self._tile_q).baddbmm_((d_a_k * SHIFT).transpose(1, 2), self._tile_k)
        dq = d_rows_q.baddbmm_(d_a_q / SHIFT, self.inverse, beta=1 / SHIFT).mul_(up)
        dk = d_rows_k.baddbmm_(d_a_k / SHIFT, self.inverse, beta=1 / SHIFT).mul_(up)
        passed = torch.mul(self._q, dq).addcmul_(self._k, dk).addcmul_(self.inverse, d_keys, value=-1 / SHIFT)
        passed[:, -1] += d_sum
        dq.addcmul_(alone, self._k)
        dk.addcmul_(alone, self._q)
        dk.add_(d_keys.addcmul_(d_ends, self.last * SHIFT).div_(up))
        return dq, dk, torch.bmm(_later(passed), passed).baddbmm_(_earlier(passed), d_ends.mul_(self.ends.view_as(d_ends)))


class Pairwise:
    """Diagonal tiles pair by pair, for log-decays without a bound."""

    def __init__(self, q: Tensor, k: Tensor, g: Tensor):
        width = q.shape[-1]
        flat = (-1, TILE, width)
        g, self._q, self._k = g.view(flat), q.view(flat), k.view(flat)
        self.factor = g.cumsum(1).exp_()
        # [P n, i, j, K]: the sum of g over j < s <= i is accumulated as it stands, not as a difference of long sums
        after = ones_below(TILE, g, diagonal=-1)
        spans = (g[:, :, None] * after[:, :, None]).cumsum(1)
        self.to_end = spans[:, -1].exp()
        self.pairs = spans.exp_().mul_(ones_below(TILE, g)[:, :, None])
        self.keys = self.pairs * self._k[:, None]
        self.a_q = (self.keys @ self._q[..., None]).view(q.shape[0], -1, TILE, TILE)
        self.a_k = (self.keys @ self._k[..., None]).view_as(self.a_q) * after
        self.rows_q, self.rows_k = ((x * self.factor).view_as(q) for x in (self._q, self._k))
        self.ends = (self._k * self.to_end).view_as(q)
        self.decay = self.factor[:, -1].reshape(q.shape[0], -1, width)

    def backward(
        self, d_rows_q: Tensor, d_rows_k: Tensor, d_ends: Tensor, d_sum: Tensor, d_a_q: Tensor, d_a_k: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `Dense.backward`."""
        dq = (d_a_q[:, :, None] @ self.keys).squeeze(2).addcmul_(d_rows_q, self.factor)
        dk = (d_a_k[:, :, None] @ self.keys).squeeze(2).addcmul_(d_rows_k, self.factor)
        rows = d_a_q[..., None] * self._q[:, :, None] + d_a_k[..., None] * self._k[:, :, None]
        dk.add_(rows.mul_(self.pairs).sum(1)).addcmul_(d_ends, self.to_end)
        later, earlier = _later(dq), _earlier(dq)
        between = (later[0, :, :, None] * earlier[0, :, None]).flatten(1)  # [t, (i, j)]: 1 for j < t <= i
        dg = between @ rows.mul_(self._k[:, None]).flatten(1, 2)
        from_start = d_rows_q.mul_(self._q).addcmul_(d_rows_k, self._k).mul_(self.factor)
        from_start[:, -1] += d_sum
        return dq, dk, dg.baddbmm_(later, from_start).baddbmm_(earlier, d_ends.mul_(self._k).mul_(self.to_end))


def ones_below(size: int, like: Tensor, *, diagonal: int = 0) -> Tensor:
    """Ones on and below a diagonal, [size, size], of `like`'s dtype and device."""
    return torch.ones(size, size, dtype=like.dtype, device=like.device).tril(diagonal)


def _later(x: Tensor) -> Tensor:
    """The matrices [N, m, m] that take x [N, m, K] to its sums over i >= t, for each t."""
    count, size, _ = x.shape
    return ones_below(size, x).T.expand(count, size, size)


def _earlier(x: Tensor) -> Tensor:
    """As `_later`, for the sum over j < t."""
    count, size, _ = x.shape
    return ones_below(size, x, diagonal=-1).expand(count, size, size)


def _view(x: Tensor, half: int) -> Tensor:
    count, size, width = x.shape
    return x.view(count, size // (2 * half), 2, half, width)


def _half(x: Tensor, half: int, which: int) -> Tensor:
    """The first or second halves of all pairs, a view [P C/2m, m, K]."""
    return _view(x, half)[:, :, which].view(-1, half, x.shape[-1])


def _scaled(x: Tensor, factor: Tensor, half: int) -> Tensor:
    return (_view(x, half) * factor).view_as(x)
