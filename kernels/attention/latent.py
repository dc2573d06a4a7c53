"""Attention over cached latents, page by page: keys and values of all heads are one vector a token (MLA, absorbed form).

A page is a product of one shape, whatever the row or its length, and pages are added in their order: a row's result depends
neither on the other rows nor on how many pages they fill. Legend: R rows, T queries of each, H heads, D width of a cached vector,
C its leading part that is summed, L cached places of a row, in pages of S.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.fastmath import exp_


def latent_attention(q: Tensor, pages: Sequence[Tensor], hidden: Tensor, width: int) -> Tensor:
    """softmax(q . cached + mask) cached[:C]: [R, T, H, C], C = `width`.

    q [R, T, H, D], scaled, in the dtype of the computation; pages: tensors [R, S, D]; hidden bool [R, T, L], true where a query
    may not look (places that hold nothing must hold finite numbers all the same). No gradients.
    """
    rows, queries, heads, _ = q.shape
    size = pages[0].shape[1]
    flat = q.reshape(rows, queries * heads, -1)
    pages = [page.to(q.dtype) for page in pages]
    scores = torch.cat([torch.bmm(flat, page.transpose(1, 2)) for page in pages], -1)
    scores.view(rows, queries, heads, -1).masked_fill_(hidden.unsqueeze(2), -torch.inf)
    weights = exp_(scores.sub_(scores.amax(-1, keepdim=True)))
    parts = weights.split(size, -1)
    total = parts[0].sum(-1, keepdim=True)
    out = torch.bmm(parts[0], pages[0][..., :width])
    for part, page in zip(parts[1:], pages[1:]):
        total += part.sum(-1, keepdim=True)
        out.baddbmm_(part, page[..., :width])
    return out.div_(total).view(rows, queries, heads, width)
