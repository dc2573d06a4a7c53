"""The histogram form: integer counts that add up over micro-batches and ranks, in any order, to the same bias."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def cutoff(scores: Tensor, bias: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Routes, and what an expert must beat to be routed to: the Top-(k+1) of score + bias.

    scores [N, E] in (0, 1), bias [E] -> (indices [N, k] int64 in descending order of score + bias, cutoff [N], the (k+1)-th
    largest). The sum is taken in the wider dtype of the two. Raises ValueError unless 1 <= top_k < E.
    """
    experts = scores.shape[-1]
    if not 1 <= top_k < experts:
        raise ValueError(f"top_k={top_k} must lie in 1..{experts - 1}: the cut-off is the (top_k+1)-th of {experts} experts")
    values, indices = (scores + bias).topk(top_k + 1, dim=-1)
    return indices[:, :top_k], values[:, top_k]


@torch.no_grad()
def limits(bias: Tensor) -> tuple[Tensor, Tensor]:
    """(low, high), scalar tensors: the range of all required biases under `bias` [E], because scores lie in (0, 1)."""
    return bias.min() - 1, bias.max() + 1


@torch.no_grad()
def count(scores: Tensor, cutoff: Tensor, bias: Tensor, bins: int, mask: Tensor | None = None) -> Tensor:
    """How often each required bias `cutoff_i - score_ij` falls into each of `bins` equal bins (report, appendix D).

    scores [N, E], cutoff [N], bias [E] (the one `cutoff` was taken with), mask bool [N] (false: padding, not counted)
    -> int32 [E, bins]. Local to this micro-batch: no communication. Counts of several calls simply add up.
    """
    experts = scores.shape[1]
    low, high = limits(bias)
    width = (high - low) / bins
    # the difference first: at bias zero the (k+1)-th expert lies on a bin edge, and must fall on one side in every batch
    place = (cutoff.unsqueeze(1) - scores).sub_(low).div_(width).long().clamp_(0, bins - 1)
    place += torch.arange(experts, device=scores.device) * bins
    if scores.device.type == "cpu":  # bincount reads the largest index back, which a GPU would have to wait for
        flat = (place if mask is None else place[mask]).reshape(-1)
        return torch.bincount(flat, minlength=experts * bins).to(torch.int32).view(experts, bins)
    one = torch.ones((), dtype=torch.int32, device=scores.device) if mask is None else mask.to(torch.int32).unsqueeze(1)
    out = torch.zeros(experts * bins, dtype=torch.int32, device=scores.device)
    return out.scatter_add_(0, place.reshape(-1), one.expand_as(place).reshape(-1)).view(experts, bins)


@torch.no_grad()
def quantiles(counts: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """The uncentred new bias from the counts of a whole step, added up over micro-batches and ranks.

    counts int [E, B], bias [E] (the frozen one of the step) -> [E] in the bias's dtype, in the same bin as the q-th smallest
    required bias, q = m k / E (`exact` gives the (q+1)-th: between the two every value routes q tokens). The number
    of counted tokens m is the sum of one row; where it is 0 the bias is returned as it is.
    """
    experts, bins = counts.shape
    low, high = (x.double() for x in limits(bias))
    width = (high - low) / bins
    cumulative = counts.cumsum(1, dtype=torch.int64)
    tokens = cumulative[0, -1]
    target = tokens * top_k  # of experts * count, so that all comparisons stay between integers
    place = (cumulative * experts < target).sum(1, keepdim=True).clamp_(max=bins - 1)
    inside = counts.gather(1, place).long()
    before = cumulative.gather(1, place) - inside
    # float64: the ratio of two counts beyond 2^24 is not exact in float32, and this is E numbers a step
    part = ((target.double() / experts - before) / inside.clamp_min(1)).clamp_(0, 1)
    new = low + (place + part).squeeze(1) * width
    return torch.where(tokens > 0, new.to(bias.dtype), bias)


@torch.no_grad()
def centre(bias: Tensor) -> Tensor:
    """`bias` [E] minus its mean: a common shift changes no route."""
    return bias - bias.mean()
