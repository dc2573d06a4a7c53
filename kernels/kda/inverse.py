"""The inverse of unit lower triangular matrices, in batches, by blocks.

Inverting halves and joining them is as stable as forward substitution. A Neumann product (I - L)(I + L^2)(I + L^4)... would be
fewer products but sums powers of L that cancel: with equal keys its float32 result has three correct digits.
"""

from __future__ import annotations

import torch
from torch import Tensor

BASE = 16  # blocks this small are solved directly


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """(I + lower)^-1 for strictly lower triangular `lower` [P, C, C]; C is BASE times a power of two. Returns [P, C, C].

    Row i of the result depends on rows 0..i of `lower` only, bit for bit.
    """
    count, size, _ = lower.shape
    blocks = diagonal_blocks(lower, BASE).reshape(-1, BASE, BASE)
    eye = torch.eye(BASE, dtype=lower.dtype, device=lower.device).expand_as(blocks)
    inverse = torch.linalg.solve_triangular(blocks, eye, upper=False, unitriangular=True)
    half = BASE
    while half < size:
        pairs = inverse.view(-1, 2, half, half)
        first, second = pairs[:, 0], pairs[:, 1]
        joined = inverse.new_zeros(pairs.shape[0], 2, half, 2, half)
        joined[:, 0, :, 0] = first
        joined[:, 1, :, 1] = second
        corner = off_diagonal_blocks(lower, half).reshape(-1, half, half)
        joined[:, 1, :, 0] = torch.bmm(second, torch.bmm(corner, first)).neg_()
        half *= 2
        inverse = joined.view(-1, half, half)
    return inverse.view(count, size, size)


def diagonal_blocks(matrix: Tensor, size: int) -> Tensor:
    """The blocks on the diagonal of `matrix` [P, C, C], a view [P, C / size, size, size]."""
    count, width, _ = matrix.shape
    n = width // size
    return matrix.view(count, n, size, n, size).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


def off_diagonal_blocks(matrix: Tensor, half: int) -> Tensor:
    """Of each diagonal block of size 2 half, its lower left quarter: a view [P, C / (2 half), half, half]."""
    return diagonal_blocks(matrix, 2 * half)[:, :, half:, :half]
