"""Cross-entropy over logits whose vocabulary is cut across tensor ranks, in the logits' own precision.

megatron-core's version computes in float32 whatever comes in, so it cannot serve a float64 proof; it is the oracle in the tests.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, mask: Tensor, group: Any) -> Tensor:
        math = torch.float64 if logits.dtype == torch.float64 else torch.float32
        shards = group.size()
        width = logits.shape[-1]
        first = group.rank() * width
        probabilities = logits.to(math, copy=True)
        peak = probabilities.amax(-1)
        if shards > 1:
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        probabilities -= peak.unsqueeze(-1)
        local = labels - first
        mine = (local >= 0) & (local < width) & mask
        local = local.clamp(0, width - 1)
        target = probabilities.gather(-1, local.unsqueeze(-1)).squeeze(-1) * mine
        probabilities.exp_()
        total = probabilities.sum(-1)
        if shards > 1:
            both = torch.stack([target, total])
            dist.all_reduce(both, group=group)
            target, total = both.unbind(0)
        losses = (total.log() - target) * mask
        probabilities /= total.unsqueeze(-1)
        ctx.save_for_backward(probabilities, local, mine, mask)
        ctx.dtype = logits.dtype
        return losses

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = grad_outputs
        probabilities, local, mine, mask = ctx.saved_tensors
        grad = grad * mask
        out = probabilities * grad.unsqueeze(-1)
        out.scatter_add_(-1, local.unsqueeze(-1), -(grad * mine).unsqueeze(-1))
        return out.to(ctx.dtype), None, None, None


def cross_entropy(logits: Tensor, labels: Tensor, mask: Tensor, group: Any) -> Tensor:
    """Per-token losses, zero where `mask` is false.

    logits [..., V / tensor ranks] (this rank's slice of the vocabulary), labels [...] int64, mask [...] bool; `group` is the
    tensor-parallel process group. Returns [...] in float32, or float64 for float64 logits. Labels at masked positions may be
    anything.
    """
    return _CrossEntropy.apply(logits, labels, mask, group)
