"""The slow, obvious forms: the exact order statistic of all scores, and counting one bin after another."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def exact(scores: Tensor, cutoff: Tensor, top_k: int) -> Tensor:
    """The uncentred new bias from all of a step's tokens at once (report eq. for Quantile Balancing, appendix C).

    scores [N, E] and cutoff [N] (the (k+1)-th largest of score + bias) -> [E]: per expert the (floor(N k / E) + 1)-th
    smallest required bias `cutoff_i - score_ij`, so that (ties aside) exactly floor(N k / E) tokens lie below it.
    Raises ValueError where there is no token.
    """
    tokens, experts = scores.shape
    if tokens == 0:
        raise ValueError("exact quantiles need at least one token, got scores of 0 tokens; keep the old bias instead")
    required = cutoff.unsqueeze(1) - scores
    return required.kthvalue(tokens * top_k // experts + 1, dim=0).values


@torch.no_grad()
def count_by_loop(scores: Tensor, cutoff: Tensor, low: Tensor, high: Tensor, bins: int) -> Tensor:
    """Counts int32 [E, bins] of the required biases of scores [N, E], one token and expert at a time. For tests."""
    out = torch.zeros(scores.shape[1], bins, dtype=torch.int32)
    width = (high - low) / bins
    for i in range(scores.shape[0]):
        for j in range(scores.shape[1]):
            place = int(((cutoff[i] - scores[i, j] - low) / width).floor())
            out[j, min(max(place, 0), bins - 1)] += 1
    return out
