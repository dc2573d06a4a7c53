"""Attention Residuals: a sublayer's input as a learned mixture of earlier blocks (report 2.2)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kernels.attnres.fused import Mix


def mix(rows: Sequence[Tensor], norm_weight: Tensor, query: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """sum_i softmax_i(score) row_i with score_i = <row_i rsqrt(mean(row_i^2) + eps), norm_weight * query>.

    rows: n >= 1 tensors [..., d], the bank's rows and the running prefix; they are read where they lie, never stacked.
    norm_weight [d], query [d] or [1, d]. There is no 1/sqrt(d), and the rows that are summed are not normalised.

    Returns out [..., d] in the rows' dtype and memory order, and weights [n, ...] (float32, float64 for float64 input,
    detached). A zero query gives the mean of the rows. Raises ValueError for shapes that differ.
    """
    rows = tuple(rows)
    if not rows:
        raise ValueError("mix: no rows; give the running prefix at least")
    width = rows[0].shape[-1]
    for i, row in enumerate(rows):
        if row.shape != rows[0].shape or row.dtype != rows[0].dtype:
            raise ValueError(
                f"mix: row {i} is {row.dtype} {tuple(row.shape)}, row 0 is {rows[0].dtype} {tuple(rows[0].shape)}; "
                "all rows need one shape and dtype"
            )
    if norm_weight.shape != (width,) or query.numel() != width:
        raise ValueError(
            f"mix: norm_weight {tuple(norm_weight.shape)} and query {tuple(query.shape)} for rows of width {width}; "
            f"give [{width}] and [{width}] or [1, {width}]"
        )
    return Mix.apply(norm_weight, query, eps, *rows)
