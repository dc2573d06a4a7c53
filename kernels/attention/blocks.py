"""Causal attention by blocks of queries: the scores of one block at a time, recomputed in the backward pass.

Legend: Q queries, K keys, D key width, V value width, g = (rows of the batch) x (heads) taken together.
A block reads only the keys from the first one that its first query can see up to its own last query, so neither the upper
triangle nor earlier documents cost anything. All of it is plain tensor code and runs on any device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import documents
from kernels.fastmath import exp_
from kernels.no_grad import call
from kernels.precision import math_dtype

# Queries a block, and scores in work at once. On a CPU the scores and their gradient stay near the level-2 cache.
CPU_BLOCK, CPU_SCORES = 64, 1 << 18
GPU_BLOCK, GPU_SCORES = 512, 1 << 28

Group = tuple[slice, slice]  # rows of the batch, heads
Span = tuple[int, int, int, int]  # first query, end query, first key, end key


class Plan:
    """Which queries meet which keys, and what hides between them."""

    def __init__(self, q: Tensor, k: Tensor, document_starts: Tensor | None):
        self.batch, self.queries, self.heads = q.shape[:3]
        self.keys = k.shape[1]
        self.skip = self.keys - self.queries  # keys before the first query
        if q.is_cuda:
            self.block, room = GPU_BLOCK, GPU_SCORES
        else:
            self.block, room = CPU_BLOCK, CPU_SCORES * torch.get_num_threads()
        fits = max(1, room // max(1, min(self.block, self.queries) * self.keys))  # (row, head) pairs at once
        self.group_heads = min(fits, self.heads)
        # a row of several documents goes alone, so that its own boundaries decide which keys it skips
        self.group_rows = 1 if document_starts is not None else max(1, fits // max(1, self.heads))
        self.future = torch.ones(self.block, self.block, dtype=torch.bool, device=q.device).triu_(1)
        self.number = None if document_starts is None else documents.ids(document_starts)
        self.table = [] if self.number is None else self.number.tolist()

    def groups(self) -> Iterator[Group]:
        for row in range(0, self.batch, self.group_rows):
            for head in range(0, self.heads, self.group_heads):
                yield slice(row, row + self.group_rows), slice(head, head + self.group_heads)

    def spans(self, group: Group) -> Iterator[Span]:
        for start in range(0, self.queries, self.block):
            end = min(start + self.block, self.queries)
            # document numbers never decrease along a row: the first key a query sees is the first with its number
            seen_from = [bisect_left(row, row[self.skip + start]) for row in self.table[group[0]]]
            yield start, end, min(seen_from, default=0), self.skip + end

    def hide(self, scores: Tensor, group: Group, span: Span) -> None:
        """Sets to -inf the scores [g, queries, keys] of a span that its queries may not see."""
        start, end, low, high = span
        size = end - start
        scores[:, :, high - low - size :].masked_fill_(self.future[:size, :size], -torch.inf)
        if self.number is not None and any(row[low] != row[high - 1] for row in self.table[group[0]]):
            number = self.number[group[0]]
            other = number[:, None, self.skip + start : self.skip + end, None] != number[:, None, None, low:high]
            scores.view(number.shape[0], -1, size, high - low).masked_fill_(other, -torch.inf)


def take(x: Tensor, group: Group, math: torch.dtype) -> Tensor:
    """[B, T, H, D] -> [g, T, D] of a group, contiguous, in the dtype of the computation."""
    part = x[group[0], :, group[1]].transpose(1, 2)
    return part.to(math).contiguous().flatten(0, 1)


def put(x: Tensor, group: Group, part: Tensor) -> None:
    """The inverse of `take`: writes [g, T, D] into x [B, T, H, D]."""
    view = x[group[0], :, group[1]].transpose(1, 2)
    view.copy_(part.view(view.shape))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, document_starts: Tensor | None) -> tuple[Tensor, Tensor]:
        math = math_dtype(q, k, v)
        plan = Plan(q, k, document_starts)
        out = q.new_empty(*q.shape[:3], v.shape[-1])
        lse = q.new_empty(plan.batch, plan.heads, plan.queries, dtype=math)
        largest = q.new_full((plan.heads,), -torch.inf, dtype=math)
        for group in plan.groups():
            q_gQD, k_gKD, v_gKV = take(q, group, math) * scale, take(k, group, math), take(v, group, math)
            out_gQV = q_gQD.new_empty(*q_gQD.shape[:2], v.shape[-1])
            lse_gQ, top_gQ = q_gQD.new_empty(q_gQD.shape[:2]), q_gQD.new_empty(q_gQD.shape[:2])
            for span in plan.spans(group):
                start, end, low, high = span
                scores = torch.bmm(q_gQD[:, start:end], k_gKD[:, low:high].transpose(1, 2))
                plan.hide(scores, group, span)
                top = scores.amax(-1, keepdim=True)
                total = exp_(scores.sub_(top)).sum(-1, keepdim=True)
                torch.div(torch.bmm(scores, v_gKV[:, low:high]), total, out=out_gQV[:, start:end])
                top_gQ[:, start:end] = top.squeeze(-1)
                lse_gQ[:, start:end] = total.log_().add_(top).squeeze(-1)
            put(out, group, out_gQV)
            shape = lse[group].shape
            lse[group] = lse_gQ.view(shape)
            largest[group[1]] = torch.maximum(largest[group[1]], top_gQ.view(shape).amax((0, 2)))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.scale = plan, scale
        ctx.mark_non_differentiable(largest)
        return out, largest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        plan, scale, math = ctx.plan, ctx.scale, lse.dtype
        d_q, d_k, d_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for group in plan.groups():
            q_gQD, k_gKD, v_gKV = take(q, group, math) * scale, take(k, group, math), take(v, group, math)
            do_gQV = take(d_out, group, math)
            delta_gQ1 = (do_gQV * take(out, group, math)).sum(-1, keepdim=True)
            lse_gQ1 = lse[group].flatten(0, 1).unsqueeze(-1)
            dq_gQD, dk_gKD, dv_gKV = torch.empty_like(q_gQD), torch.zeros_like(k_gKD), torch.zeros_like(v_gKV)
            for span in plan.spans(group):
                start, end, low, high = span
                keys, values = k_gKD[:, low:high], v_gKV[:, low:high]
                queries, d_block = q_gQD[:, start:end], do_gQV[:, start:end]
                scores = torch.bmm(queries, keys.transpose(1, 2))
                plan.hide(scores, group, span)
                weights = exp_(scores.sub_(lse_gQ1[:, start:end]))
                dv_gKV[:, low:high].baddbmm_(weights.transpose(1, 2), d_block)
                d_scores = torch.bmm(d_block, values.transpose(1, 2)).sub_(delta_gQ1[:, start:end]).mul_(weights)
                torch.mul(torch.bmm(d_scores, keys), scale, out=dq_gQD[:, start:end])
                dk_gKD[:, low:high].baddbmm_(d_scores.transpose(1, 2), queries)
            put(d_q, group, dq_gQD)
            put(d_k, group, dk_gKD)
            put(d_v, group, dv_gKV)
        return d_q, d_k, d_v, None, None


def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, document_starts: Tensor | None) -> tuple[Tensor, Tensor]:
    return call(_Attention, q, k, v, scale, document_starts)
