"""What happens inside a chunk: decayed queries and keys, and their causal products, with the backward pass (spec 2.5).

With G the running sum of the log-decay g from the chunk's start, a chunk needs
    rows_q = q exp(G)    rows_k = k exp(G)    ends = k exp(G_last - G)    decay = exp(G_last)
    a_q[i, j] = sum_K q_i k_j exp(G_i - G_j) for j <= i        a_k likewise with k_i, for j < i
The chunk is cut into tiles of 16 tokens. Tiles of equal size are joined pairwise until one is left, each product between the two
halves anchored at their border, so that no exponent there is positive. On the diagonal:
  dense    (bounded gate): exp(G_i) and exp(-G_j), from the tile's start, are both representable (|g| <= 5), a plain product.
  pairwise (softplus gate): exp(G_i - G_j) for each pair, the difference summed directly and at most 0.
All anchors precede the row they serve: later tokens cannot change an earlier result, not even in its rounding.

Gradients of g: per channel, what passes from token j to token i passes as exp(G_i - G_j) and belongs to every g_t with j < t <= i.
With R_i = q_i dq_i + k_i dk_i (as a row) and E_j = k_j dk_j (as a column), dg_t is the sum over i >= t of R_i - E_i, but that
difference cancels nearly everything between tokens on the same side of t. So each product is summed by itself, on the side of its
anchor where nothing cancels:
  the chunk, from and to the states around it: R_i over i >= t, E_j over j < t, decay in full
  two halves, anchored at their border: R_i over i >= t for t in the second, E_j over j < t for t in the first
  the diagonal tile: dense takes R_i - E_i, within 16 tokens and without the pair i = j; pairwise the pairs j < t <= i themselves

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
    # what the rows and the ends of a token passed on, of all products that reach beyond the part at hand (at last, a tile)
    from_rows = torch.mul(tiles.rows_q, d_rows_q).addcmul_(tiles.rows_k, d_rows_k)
    from_ends = tiles.ends * d_ends
    across = tiles.decay * d_decay  # [parts, K]: of what passes over a whole part
    for level in reversed(tiles.levels):
        half = level.half
        # what reaches the second half from before this part passes over the first, and the other way round
        over = torch.stack([_half(from_rows, half, 1).sum(1), _half(from_ends, half, 0).sum(1)], 1)
        across = over.add_(across[:, None]).flatten(0, 1)
        for d_rows in (d_rows_q, d_rows_k):
            _view(d_rows, half).mul_(level.row_factor)
        _view(d_ends, half).mul_(level.end_factor)
        d_q, d_k = (off_diagonal_blocks(d, half).reshape(-1, half, half) for d in (d_a_q, d_a_k))
        joins = (
            (d_rows_q, from_rows, 1, level.rows_q, torch.bmm(d_q, level.ends)),
            (d_rows_k, from_rows, 1, level.rows_k, torch.bmm(d_k, level.ends)),
            (d_ends, from_ends, 0, level.ends,
             torch.bmm(d_q.transpose(1, 2), level.rows_q).baddbmm_(d_k.transpose(1, 2), level.rows_k)),
        )  # fmt: skip
        for d, passed, which, x, d_x in joins:
            _half(d, half, which).add_(d_x)
            _half(passed, half, which).addcmul_(x, d_x)
    blocks = (diagonal_blocks(d, TILE).reshape(-1, TILE, TILE) for d in (d_a_q, d_a_k))
    dq, dk, dg = tiles.diagonal.backward(d_rows_q, d_rows_k, d_ends, *blocks)
    dg.baddbmm_(_later(dg), from_rows.view_as(dg)).baddbmm_(_earlier(dg), from_ends.view_as(dg)).add_(across[:, None])
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
        self.inverse = k.view(flat) / self.factor
        self.rows_q, self.rows_k = (torch.mul(x.view(flat), self.factor) for x in (q, k))
        keys = self.inverse.transpose(1, 2)
        self.a_q = torch.bmm(self.rows_q, keys).mul_(ones_below(TILE, q)).view(q.shape[0], -1, TILE, TILE)
        self.a_k = torch.bmm(self.rows_k, keys).mul_(ones_below(TILE, q, diagonal=-1)).view_as(self.a_q)
        self._tile_q, self._tile_k = self.rows_q, self.rows_k
        self.ends = (self.inverse * self.last).view_as(q)
        self.rows_q, self.rows_k = self.rows_q.view_as(q), self.rows_k.view_as(q)
        self.decay = self.last.reshape(q.shape[0], -1, width)

    def backward(
        self, d_rows_q: Tensor, d_rows_k: Tensor, d_ends: Tensor, d_a_q: Tensor, d_a_k: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, and dg of the products in the tile), [P n, m, K]."""
        flat = self.factor.shape
        # a token's product with itself does not decay: aside, it adds no rounding to dg
        alone = d_a_q.diagonal(dim1=1, dim2=2).unsqueeze(2).clone()
        d_a_q.diagonal(dim1=1, dim2=2).zero_()
        up = self.factor * SHIFT
        d_keys = torch.bmm((d_a_q * SHIFT).transpose(1, 2), self._tile_q).baddbmm_((d_a_k * SHIFT).transpose(1, 2), self._tile_k)
        dq, dk = torch.bmm(d_a_q / SHIFT, self.inverse), torch.bmm(d_a_k / SHIFT, self.inverse)
        # value goes to the first factor: the second is near the ends of float32's range
        passed = torch.mul(self._tile_q * SHIFT, dq).addcmul_(self._tile_k, dk, value=SHIFT)
        passed.addcmul_(self.inverse, d_keys, value=-1 / SHIFT)
        dq.add_(d_rows_q.view(flat), alpha=1 / SHIFT).mul_(up).addcmul_(alone, self._k)
        dk.add_(d_rows_k.view(flat), alpha=1 / SHIFT).mul_(up).addcmul_(alone, self._q)
        d_keys.addcmul_(d_ends.view(flat), self.last * SHIFT).div_(up)
        return dq, dk.add_(d_keys), torch.bmm(_later(passed), passed)


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
        self, d_rows_q: Tensor, d_rows_k: Tensor, d_ends: Tensor, d_a_q: Tensor, d_a_k: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        flat = self.factor.shape
        dq = (d_a_q[:, :, None] @ self.keys).squeeze(2).addcmul_(d_rows_q.view(flat), self.factor)
        dk = (d_a_k[:, :, None] @ self.keys).squeeze(2).addcmul_(d_rows_k.view(flat), self.factor)
        rows = d_a_q[..., None] * self._q[:, :, None] + d_a_k[..., None] * self._k[:, :, None]
        dk.add_(rows.mul_(self.pairs).sum(1)).addcmul_(d_ends.view(flat), self.to_end)
        passed = rows.mul_(self._k[:, None]).flatten(1, 2)  # [P n, (i, j), K]
        # [t, (i, j)]: the pairs j < t <= i
        between = (_later(dq)[0, :, :, None] * _earlier(dq)[0, :, None]).flatten(1)
        return dq, dk, between @ passed


def ones_below(size: int, like: Tensor, *, diagonal: int = 0) -> Tensor:
    """Ones on and below a diagonal, [size, size], of `like`'s dtype and device."""
    return torch.ones(size, size, dtype=like.dtype, device=like.device).tril(diagonal)


def _later(x: Tensor) -> Tensor:
    """What sums x [N, m, K] over i >= t when multiplied with it, [N, m, m]."""
    count, size, _ = x.shape
    return ones_below(size, x).T.expand(count, size, size)


def _earlier(x: Tensor) -> Tensor:
    """As `_later`, over j < t."""
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
