"""Quantile Balancing: counts are integers that add up, and the bias they give balances."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import quantile
from kernels.quantile.reference import count_by_loop


def _scores(tokens: int, experts: int, *, seed: int = 0, dtype: torch.dtype = torch.float64, skew: float = 1.0) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=gen, dtype=dtype) + skew * torch.randn(experts, generator=gen, dtype=dtype)
    return torch.sigmoid(logits)


def _update(scores: Tensor, bias: Tensor, top_k: int, bins: int = 1000) -> Tensor:
    _, cut = quantile.cutoff(scores, bias, top_k)
    return quantile.centre(quantile.quantiles(quantile.count(scores, cut, bias, bins), bias, top_k))


def _max_over_mean(scores: Tensor, bias: Tensor, top_k: int) -> float:
    load = torch.bincount(quantile.cutoff(scores, bias, top_k)[0].reshape(-1), minlength=scores.shape[1]).double()
    return float(load.max() / load.mean())


@given(tokens=st.integers(1, 40), experts=st.integers(2, 12), bins=st.integers(1, 50), seed=st.integers(0, 2**16), data=st.data())
@settings(max_examples=30, deadline=None)
def test_count_equals_the_loop(tokens: int, experts: int, bins: int, seed: int, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, experts - 1))
    scores = _scores(tokens, experts, seed=seed)
    bias = torch.randn(experts, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 0.3
    _, cut = quantile.cutoff(scores, bias, top_k)
    counts = quantile.count(scores, cut, bias, bins)
    assert counts.dtype == torch.int32
    assert torch.equal(counts, count_by_loop(scores, cut, *quantile.limits(bias), bins))
    assert (counts.sum(1) == tokens).all()


def test_routes_are_descending_and_the_cutoff_comes_next() -> None:
    scores, bias = _scores(50, 9, dtype=torch.float32), torch.linspace(-0.2, 0.2, 9)
    indices, cut = quantile.cutoff(scores, bias, 3)
    order = (scores + bias).sort(dim=1, descending=True)
    assert torch.equal(indices, order.indices[:, :3])
    assert torch.equal(cut, order.values[:, 3])
    assert cut.dtype == torch.float32
    assert quantile.cutoff(scores.double(), bias, 3)[1].dtype == torch.float64


@pytest.mark.parametrize("top_k", [0, 9])
def test_top_k_out_of_range_is_named(top_k: int) -> None:
    with pytest.raises(ValueError, match=f"top_k={top_k} must lie in 1..8"):
        quantile.cutoff(_scores(4, 9), torch.zeros(9), top_k)


def test_counts_do_not_depend_on_micro_batches_or_token_order() -> None:
    scores, bias = _scores(600, 16, dtype=torch.float32), torch.linspace(-0.3, 0.3, 16)
    _, cut = quantile.cutoff(scores, bias, 4)
    whole = quantile.count(scores, cut, bias, 200)
    order = torch.randperm(600, generator=torch.Generator().manual_seed(1))
    pooled = torch.zeros_like(whole)
    for part in order.split([100, 7, 493]):
        pooled += quantile.count(scores[part], cut[part], bias, 200)
    assert torch.equal(pooled, whole)
    assert torch.equal(quantile.quantiles(pooled, bias, 4), quantile.quantiles(whole, bias, 4))


def test_pooled_quantiles_balance_where_averaged_ones_do_not() -> None:
    # two micro-batches from different documents: each wants other experts
    top_k = 2
    halves = [_scores(2000, 16, seed=s, skew=3.0) for s in (1, 2)]
    both = torch.cat(halves)
    pooled = averaged = torch.zeros(16, dtype=torch.float64)
    for _ in range(10):
        pooled = _update(both, pooled, top_k)
        averaged = torch.stack([_update(h, averaged, top_k) for h in halves]).mean(0)
    assert _max_over_mean(both, pooled, top_k) < 1.1
    assert _max_over_mean(both, averaged, top_k) > 2


def test_padding_is_not_counted() -> None:
    scores, bias = _scores(64, 8, dtype=torch.float32), torch.zeros(8)
    mask = torch.arange(64) % 3 != 0
    _, cut = quantile.cutoff(scores, bias, 2)
    with_padding = quantile.count(scores, cut, bias, 100, mask)
    assert torch.equal(with_padding, quantile.count(scores[mask], cut[mask], bias, 100))
    assert int(with_padding.sum()) == 8 * int(mask.sum())


def test_a_step_without_tokens_keeps_the_bias() -> None:
    bias = torch.tensor([0.3, -0.1, -0.2])
    counts = quantile.count(torch.rand(5, 3), torch.rand(5), bias, 10, torch.zeros(5, dtype=torch.bool))
    assert int(counts.sum()) == 0
    assert torch.equal(quantile.quantiles(counts, bias, 1), bias)
    with pytest.raises(ValueError, match="at least one token"):
        quantile.exact(torch.zeros(0, 3), torch.zeros(0), 1)


def test_required_biases_below_the_bias_are_the_load() -> None:
    # multiples of 2^-20, so that cut-off minus score is exact and a tie is a tie
    scores = (_scores(500, 12) * 2**20).floor() / 2**20
    bias = (torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 2**18).floor() / 2**20
    indices, cut = quantile.cutoff(scores, bias, 3)
    required = cut.unsqueeze(1) - scores
    assert torch.equal((required < bias).sum(0), torch.bincount(indices.reshape(-1), minlength=12))


def test_histogram_lies_in_the_bin_of_the_exact_quantile() -> None:
    scores, bias = _scores(3000, 24), torch.zeros(24, dtype=torch.float64)
    for top_k in (1, 5, 23):
        _, cut = quantile.cutoff(scores, bias, top_k)
        got = quantile.quantiles(quantile.count(scores, cut, bias, 500), bias, top_k)
        low, high = quantile.limits(bias)
        last_inside = (cut.unsqueeze(1) - scores).kthvalue(-(-3000 * top_k // 24), dim=0).values
        assert (got - last_inside).abs().max() <= (high - low) / 500
        bias = quantile.centre(got)


def test_large_counts_stay_exact() -> None:
    # 2^26 + 2 tokens: float32 could not tell these counts apart
    counts = torch.tensor([[2**25 + 1, 0, 2**25 + 1], [2**25, 2, 2**25]], dtype=torch.int32)
    got = quantile.quantiles(counts, torch.zeros(2, dtype=torch.float64), 1)
    third = 2 / 3
    torch.testing.assert_close(got, torch.tensor([-1 + third, -1 + 1.5 * third], dtype=torch.float64), atol=1e-9, rtol=0)


def test_balances_many_skewed_experts_in_one_update() -> None:
    experts, top_k = 224, 8
    bias = torch.zeros(experts)
    gen = torch.Generator().manual_seed(0)
    mean = torch.randn(experts, generator=gen)
    fresh = lambda: torch.sigmoid(torch.randn(4096, experts, generator=gen) + mean)
    before = fresh()
    assert _max_over_mean(before, bias, top_k) > 4
    bias = _update(before, bias, top_k)
    assert _max_over_mean(fresh(), bias, top_k) < 1.6
    assert abs(float(bias.mean())) < 1e-6
