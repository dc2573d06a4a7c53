"""Attention Residuals: a sublayer's input as a learned mixture of earlier blocks (report 2.2)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kernels.attnres.fused import Mix
from kernels.attnres.normed import MixNorm
from kernels.no_grad import call


def mix(rows: Sequence[Tensor], norm_weight: Tensor, query: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """sum_i softmax_i(score) row_i with score_i = <row_i rsqrt(mean(row_i^2) + eps), norm_weight * query>.

    rows: n >= 1 tensors [..., d], the bank's rows and the running prefix; they are read where they lie, never stacked.
    norm_weight [d], query [d] or [1, d]. There is no 1/sqrt(d), and the rows that are summed are not normalised.

    Returns out [..., d] in the rows' dtype and memory order, and weights [n, ...] (float32, float64 for float64 input,
    detached). A zero query gives the mean of the rows. Raises ValueError for shapes that differ.
    """
    rows = _checked("mix", rows, norm_weight, query)
    return call(Mix, norm_weight, query, eps, *rows)


def mix_norm(
    rows: Sequence[Tensor], norm_weight: Tensor, query: Tensor, out_weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """RMSNorm of `mix`, with weight out_weight [d] and the same eps; the mix itself is never saved (report 5.2.2).

    Arguments, results and errors are those of `mix`, with out [..., d] the normed mix. Saves the rows by reference, three
    numbers a token and row and one a token; the backward pass mixes once more.
    """
    rows = _checked("mix_norm", rows, norm_weight, query)
    if out_weight.shape != norm_weight.shape:
        raise ValueError(f"mix_norm: out_weight {tuple(out_weight.shape)} for rows of width {len(norm_weight)}; give [width]")
    return call(MixNorm, norm_weight, query, out_weight, eps, *rows)


def _checked(name: str, rows: Sequence[Tensor], norm_weight: Tensor, query: Tensor) -> tuple[Tensor, ...]:
    rows = tuple(rows)
    if not rows:
        raise ValueError(f"{name}: no rows; give the running prefix at least")
    width = rows[0].shape[-1]
    for i, row in enumerate(rows):
        if row.shape != rows[0].shape or row.dtype != rows[0].dtype:
            raise ValueError(
                f"{name}: row {i} is {row.dtype} {tuple(row.shape)}, row 0 is {rows[0].dtype} {tuple(rows[0].shape)}; "
                "all rows need one shape and dtype"
            )
    if norm_weight.shape != (width,) or query.numel() != width:
        raise ValueError(
            f"{name}: norm_weight {tuple(norm_weight.shape)} and query {tuple(query.shape)} for rows of width {width}; "
            f"give [{width}] and [{width}] or [1, {width}]"
        )
    return rows
