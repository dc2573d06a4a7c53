"""Causal attention by torch's fused kernels, and the largest logits in a second sweep over the scores.

The fused kernels keep their running output in float32 (report 2.1.2), but none of them gives the largest logit. Its sweep
holds the scores of one block of queries, so its cost is one more score product, forward only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import documents
from kernels.attention.blocks import Plan, take


@torch.no_grad()
def largest_logits(q: Tensor, k: Tensor, *, scale: float, document_starts: Tensor | None) -> Tensor:
    """[H] float32: the largest scaled logit inside the mask, by blocks of queries."""
    plan = Plan(q, k, document_starts)
    largest = torch.full((plan.heads,), -torch.inf, device=q.device)
    for group in plan.groups():
        # products of bf16 numbers are exact in float32; only their sum rounds
        q_gQD, k_gKD = take(q, group, torch.float32) * scale, take(k, group, torch.float32)
        for span in plan.spans(group):
            start, end, low, high = span
            scores = torch.bmm(q_gQD[:, start:end], k_gKD[:, low:high].transpose(1, 2))
            plan.hide(scores, group, span)
            top = scores.view(-1, len(range(plan.heads)[group[1]]), scores[0].numel()).amax((0, 2))
            largest[group[1]] = torch.maximum(largest[group[1]], top)
    return largest


def refuses(q: Tensor, k: Tensor, v: Tensor, **_: object) -> str | None:
    if not q.is_cuda:
        return "not on a GPU; the blockwise path is faster on a CPU"
    if q.dtype == torch.float64:
        return "float64 input"
    return None


def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, document_starts: Tensor | None) -> tuple[Tensor, Tensor]:
    q_BHQD, k_BHKD, v_BHKV = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    queries, keys = q.shape[1], k.shape[1]
    if document_starts is None and queries == keys:
        out = F.scaled_dot_product_attention(q_BHQD, k_BHKD, v_BHKV, is_causal=True, scale=scale)
    else:
        place = torch.arange(keys, device=q.device)
        seen = (place <= place[keys - queries :].unsqueeze(1)).unsqueeze(0)
        if document_starts is not None:
            number = documents.ids(document_starts)
            seen = seen & (number[:, keys - queries :, None] == number[:, None, :])
        out = F.scaled_dot_product_attention(q_BHQD, k_BHKD, v_BHKV, attn_mask=seen.unsqueeze(1), scale=scale)
    return out.transpose(1, 2).contiguous(), largest_logits(q, k, scale=scale, document_starts=document_starts)
