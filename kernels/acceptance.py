"""How often a target accepts what a draft proposes, as a loss (report 4.3): -log sum_v min(p(v), q(v)). V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.precision import math_dtype


def acceptance_loss(target: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [..., V] of both -> (the loss [...] in float32, float64 for float64 logits; where both have the same likeliest
    token, 1, else 0, [...]).

    exp(-loss) is the chance that a token drawn from the draft is accepted at temperature 1. No gradient flows to the target.
    """
    math = math_dtype(draft)
    with torch.no_grad():
        p = target.to(math).softmax(-1)
        same = (target.argmax(-1) == draft.argmax(-1)).to(math)
    q = draft.to(math).log_softmax(-1)
    # as a sum of logarithms, so that a draft that is far off still has a gradient: log sum_v exp(min(log p, log q))
    return -torch.logsumexp(torch.minimum(p.log(), q), -1), same
