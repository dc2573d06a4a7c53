"""Quintic iterations on the shorter side of many blocks, under a bound on memory; the products are those of products.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kernels.dispatch import Backend, choose
from kernels.newton_schulz import products
from kernels.newton_schulz.products import Plan

BACKENDS = (
    Backend("syrk", products.syrk, products.syrk_refuses),
    Backend("panels", products.panels, products.panels_refuse),
    Backend("batched", products.batched),
)

# (a, b, c) of each step; the last one is repeated where more steps are asked for.
COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "quintic": ((3.4445, -4.7750, 2.0315),),
    # arXiv:2505.16932, each polynomial already divided by its safety factor of 1.01
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
}


@torch.no_grad()
def orthogonalise(
    blocks: Tensor,
    *,
    steps: int = 5,
    coefficients: str = "quintic",
    precision: torch.dtype | None = None,
    eps: float = 1e-7,
    chunk_elements: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Replaces the singular values of every block by values near 1.

    blocks [n, rows, cols] -> [n, rows, cols] in the same dtype. Each block is divided by its own Frobenius norm (at least
    `eps`: a zero block gives zeros, and rounding noise below `eps` is not blown up to a full update).

    precision: the dtype of the products. None: float64 for float64 blocks, else real float32 whatever
        `torch.set_float32_matmul_precision` says. torch.bfloat16: as the inherited recipe runs on GPUs.
    chunk_elements: at most so many elements (at least one block) are worked on at a time, `default_chunk` if None; the
        temporaries take about four times that.
    backend: "syrk" (CUDA, bf16), "panels" (CPU, long sides) or "batched" to force a path; None takes the fastest that fits.
    Raises ValueError for another shape, an unknown name of coefficients, steps below 1, or a backend that does not fit.
    """
    if blocks.dim() != 3:
        raise ValueError(f"blocks of shape {tuple(blocks.shape)} must be [n, rows, cols]; add a leading axis to one matrix")
    if coefficients not in COEFFICIENTS:
        raise ValueError(f"coefficients={coefficients!r} is unknown; use one of {', '.join(COEFFICIENTS)}")
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")
    table = COEFFICIENTS[coefficients]
    plan = [table[min(i, len(table) - 1)] for i in range(steps)]
    wide = torch.float64 if blocks.dtype == torch.float64 else torch.float32
    chunk_elements = chunk_elements or default_chunk(blocks.device)
    size = max(1, chunk_elements // max(1, blocks.shape[1] * blocks.shape[2]))
    out = torch.empty(blocks.shape, dtype=blocks.dtype, device=blocks.device)
    with _real_float32():
        for first in range(0, blocks.shape[0], size):
            out[first : first + size] = _iterate(blocks[first : first + size].to(wide), plan, precision or wide, eps, backend)
    return out


def default_chunk(device: torch.device) -> int:
    """Elements worked on at a time: on a CPU what its cache holds (a fifth faster than all at once), else 256 MiB."""
    return 1 << 18 if device.type == "cpu" else 1 << 26


def _iterate(blocks: Tensor, plan: Plan, dtype: torch.dtype, eps: float, only: str | None) -> Tensor:
    norm = torch.linalg.vector_norm(blocks, dim=(-2, -1), keepdim=True)
    tall = blocks.shape[-2] > blocks.shape[-1]
    x = (blocks / norm.clamp_min(eps)).to(dtype)
    x = (x.mT if tall else x).contiguous()
    x = choose("newton_schulz", BACKENDS, x, only=only).run(x, plan)
    return x.mT if tall else x


@contextmanager
def _real_float32() -> Iterator[None]:
    """Under the global precision `medium` or `high` a float32 product may run in bf16 or TF32; here it may not."""
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
