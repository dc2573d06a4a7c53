"""Attention of a draft's later steps, which run on its own outputs: past keys from the first step, and one key of each later one.

Plain tensor code, a block of queries at a time, each computed once more in the backward pass. Legend: B rows, T queries, K keys,
H heads, D key width, V value width, n later steps, the one at hand included.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels import documents
from kernels.precision import math_dtype

BLOCK = 512  # queries whose scores exist at once


def attention_ahead(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
    *,
    scale: float,
    document_starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q [B, T, H, D] are the last T of K positions; k [B, K, H, D], v [B, K, H, V]; own_keys, own_values: n of [B, T, H, D] and
    [B, T, H, V]. Position t sees k and v of its document up to itself, and its own place in each of the n. document_starts: bool
    [B, K], or None for one document a row.

    Returns out [B, T, H, V] in q's dtype and max_logits [H], as `kernels.attention.attention`.
    """
    batch, queries = q.shape[:2]
    past = k.shape[1]
    starts = documents.resolve(document_starts, batch, past, continues=False, device=k.device)
    number = documents.ids(starts)
    own_k, own_v = torch.stack(list(own_keys), 2), torch.stack(list(own_values), 2)  # [B, T, n, H, .]
    outs, highest = [], []
    for first in range(0, queries, BLOCK):
        at = slice(first, min(first + BLOCK, queries))
        end = past - queries + at.stop
        inputs = (q[:, at], k[:, :end], v[:, :end], own_k[:, at], own_v[:, at], number[:, :end], scale)
        if torch.is_grad_enabled():
            out, high = checkpoint(_block, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            out, high = _block(*inputs)
        outs.append(out)
        highest.append(high)
    return torch.cat(outs, 1), torch.stack(highest).amax(0)


def _block(q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, number: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The queries are the last of the keys' positions."""
    math, size, keys = math_dtype(q), q.shape[1], k.shape[1]
    place = torch.arange(keys, device=q.device)
    hidden = place > place[-size:, None]
    hidden = hidden | (number[:, None, :] != number[:, -size:, None])  # [B, T, K]
    q = q.to(math) * scale
    past = torch.einsum("bthd,bkhd->bhtk", q, k.to(math)).masked_fill(hidden.unsqueeze(1), -torch.inf)
    own = torch.einsum("bthd,btnhd->bhtn", q, own_k.to(math))
    scores = torch.cat([past, own], -1)
    weights = scores.softmax(-1)
    out = torch.einsum("bhtk,bkhv->bthv", weights[..., :keys], v.to(math))
    out = out + torch.einsum("bhtn,btnhv->bthv", weights[..., keys:], own_v.to(math))
    return out.to(v.dtype), scores.detach().amax((0, 2, 3))
