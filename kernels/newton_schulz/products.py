"""The iterations themselves, X <- a X + (b A + c A^2) X with A = X X^T, on three kinds of products.

A and A^2 are symmetric: `panels` and `syrk` compute about half of them and mirror it. Every path takes X [n, rows, cols] with
rows <= cols, contiguous, in the dtype of the products, and the coefficients of each iteration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

Plan = Sequence[tuple[float, float, float]]

# Rows of a panel: high enough that a product of one panel runs at the rate of a whole one. Measured at 192..1024 rows.
PANEL = {torch.bfloat16: 256}
PANEL_OTHERWISE = 128
SYRK_CAPABILITIES = ((8, 0), (9, 0), (10, 0), (10, 3))  # those that emerging-optimizers vouches for


def batched(x: Tensor, plan: Plan) -> Tensor:
    """Whole products of all matrices at once: the reference, and the fastest for short sides."""
    for a, b, c in plan:
        gram = torch.bmm(x, x.mT)
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, factor, x, beta=a)
    return x


def panels(x: Tensor, plan: Plan) -> Tensor:
    """Matrix by matrix; of a symmetric product each panel of rows as far as its diagonal (of p panels, (p + 1) / 2p)."""
    rows = x.shape[1]
    gram, factor = x.new_empty(rows, rows), x.new_empty(rows, rows)
    out = torch.empty_like(x)
    spare = torch.empty_like(x[0])
    for source, target in zip(x, out):
        # iterations alternate between two buffers so that the last one ends in `target`
        buffers = (target, spare) if len(plan) % 2 else (spare, target)
        current = source
        for i, (a, b, c) in enumerate(plan):
            for first, last in _panels(rows, x.dtype):
                torch.mm(current[first:last], current[:last].T, out=gram[first:last, :last])
                gram[:first, first:last] = gram[first:last, :first].T
            for first, last in _panels(rows, x.dtype):
                part = factor[first:last, :last]
                torch.addmm(gram[first:last, :last], gram[first:last], gram[:, :last], beta=b, alpha=c, out=part)
                factor[:first, first:last] = factor[first:last, :first].T
            current = torch.addmm(current, factor, current, beta=a, out=buffers[i % 2])
    return out


def panels_refuse(x: Tensor) -> str | None:
    if x.device.type != "cpu":
        return "is for CPUs"
    least = 3 * _panel(x.dtype) // 2 if x.dtype in PANEL else 2 * _panel(x.dtype)
    if x.shape[1] < least:
        return f"short sides below {least} are not worth cutting"
    return None


def syrk(x: Tensor, plan: Plan) -> Tensor:
    """Matrix by matrix on emerging-optimizers' Triton kernel. No machine of this project's tests has run it."""
    from emerging_optimizers.triton_kernels import tsyrk_ex

    out = torch.empty_like(x)
    for source, target in zip(x, out):
        current = source
        for a, b, c in plan:
            gram = tsyrk_ex(current)
            factor = tsyrk_ex(gram, gram, alpha=c, beta=b)
            current = torch.addmm(current, factor, current, beta=a)
        target.copy_(current)
    return out


def syrk_refuses(x: Tensor) -> str | None:
    if x.device.type != "cuda":
        return "needs CUDA"
    if x.dtype != torch.bfloat16:
        return "is for bf16 products (optim.muon.precision=bf16)"
    if x.shape[1] % 8 or x.shape[2] % 8:
        return "sides must be multiples of 8"
    if x.shape[1] < 256:
        return "short sides below 256 are faster in one batch"
    if (capability := torch.cuda.get_device_capability(x.device)) not in SYRK_CAPABILITIES:
        return f"compute capability {capability[0]}.{capability[1]} is not one the kernel is right on"
    try:
        from emerging_optimizers import triton_kernels
    except ImportError:
        return "emerging-optimizers is not installed"
    return None if triton_kernels.HAS_TRITON_340 else "needs Triton 3.4"


def _panel(dtype: torch.dtype) -> int:
    return PANEL.get(dtype, PANEL_OTHERWISE)


def _panels(rows: int, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    """[first, last) of even panels."""
    count = -(-rows // _panel(dtype))
    edges = [rows * i // count for i in range(count + 1)]
    yield from pairwise(edges)
