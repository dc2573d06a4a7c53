"""Causal attention with every score in one tensor: the reading that the blockwise path must agree with."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import documents
from kernels.precision import math_dtype


def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, document_starts: Tensor | None) -> tuple[Tensor, Tensor]:
    queries, keys = q.shape[1], k.shape[1]
    math = math_dtype(q, k, v)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(math), k.to(math)) * scale
    place = torch.arange(keys, device=q.device)
    seen = (place <= place[keys - queries :].unsqueeze(1)).expand(q.shape[0], -1, -1)
    if document_starts is not None:
        number = documents.ids(document_starts)
        seen = seen & (number[:, keys - queries :, None] == number[:, None, :])
    scores = scores.masked_fill(~seen.unsqueeze(1), -torch.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.to(math)).to(q.dtype)
    return out, scores.detach().amax((0, 2, 3))
