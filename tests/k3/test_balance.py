"""Balancing counts: once for each token, whatever is micro-batched, recomputed or padded; and what each mode does to the bias."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import k3
from k3.config import Balance
from kernels import quantile
from tests.k3.randomise import randomise


def build(balance: Balance = Balance.quantile, **moe) -> torch.nn.Module:
    config = k3.preset("tiny")
    return randomise(k3.build(replace(config, moe=replace(config.moe, balance=balance, **moe)), dtype=torch.float64)).train()


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(5))


def run(model: torch.nn.Module, *batches: torch.Tensor, padding: torch.Tensor | None = None) -> None:
    for x in batches:
        model(x, labels=x.roll(-1, 1), padding=padding).sum().backward()


def counts(model: torch.nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(b.counting.clone(), b.histogram.clone()) for b in k3.balancing(model)]


def same(a: list, b: list) -> bool:
    return all(torch.equal(x, y) for left, right in zip(a, b, strict=True) for x, y in zip(left, right, strict=True))


def test_every_token_is_counted_once() -> None:
    model = build()
    run(model, tokens(2, 24))
    for loads, histogram in counts(model):
        assert loads.sum() == 2 * 24 * 2  # top-2
        assert (histogram.sum(1) == 2 * 24).all()


def test_micro_batches_add_up() -> None:
    whole, parts = build(), build()
    x = tokens(4, 24)
    run(whole, x)
    run(parts, x[:1], x[1:2], x[2:])
    assert same(counts(whole), counts(parts))


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_counts_nothing_twice(reentrant: bool) -> None:
    plain, recomputed = build(), build()
    x = tokens(2, 24)
    run(plain, x)
    for layer in recomputed.layers.values():
        inner: Callable = layer.feed_forward.forward
        layer.feed_forward.forward = lambda h, context, f=inner: checkpoint(f, h, context, use_reentrant=reentrant)
    run(recomputed, x)
    assert same(counts(plain), counts(recomputed))
    for a, b in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert a.grad is None or torch.equal(a.grad, b.grad)


def test_padding_is_not_counted() -> None:
    model, alone = build(), build()
    x = tokens(2, 30)
    padding = torch.zeros(2, 30, dtype=torch.bool)
    padding[:, 20:] = True
    run(model, x, padding=padding)
    run(alone, x[:, :20])
    # the MTP layer at the last real token reads the next one, so only the backbone's counts are the shorter rows'
    assert same(counts(model)[:-1], counts(alone)[:-1])
    assert counts(model)[-1][0].sum() == counts(alone)[-1][0].sum() == 2 * 20 * 2


def test_evaluation_and_inference_count_nothing() -> None:
    model = build()
    with torch.no_grad():
        model(tokens(1, 20))
    run(model.eval(), tokens(1, 20))
    assert all(not loads.any() and not histogram.any() for loads, histogram in counts(model))


def test_update_sets_the_pooled_quantile_and_evens_the_load() -> None:
    model = build()
    x = tokens(8, 64)
    run(model, x)
    before = [b.counting.double() for b in k3.balancing(model)]
    expected = [quantile.centre(quantile.quantiles(b.histogram, b.bias, b.top_k)) for b in k3.balancing(model)]
    for b in k3.balancing(model):
        b.update()
    for b, want, load in zip(k3.balancing(model), expected, before, strict=True):
        assert torch.equal(b.bias, want) and torch.equal(b.load, load.long())
        assert not b.counting.any() and not b.histogram.any()
        assert abs(b.bias.mean()) < 1e-12
    run(model, x)
    after = [b.counting.double() for b in k3.balancing(model)]
    # the first router's scores do not depend on any bias, so its second load is the balanced one
    excess = [load.max() / load.mean() - 1 for load in (before[0], after[0])]
    assert excess[0] > 1 and excess[1] < 0.2 * excess[0]


def test_a_skipped_step_is_reported_and_forgotten() -> None:
    model = build()
    run(model, tokens(1, 20))
    before = [(b.bias.clone(), b.counting.clone()) for b in k3.balancing(model)]
    k3.balancing(model).reset()
    for b, (bias, counted) in zip(k3.balancing(model), before, strict=True):
        assert torch.equal(b.bias, bias) and torch.equal(b.load, counted) and counted.any()
        assert not b.counting.any() and not b.histogram.any()


def test_bias_step_follows_the_sign_of_the_load() -> None:
    model = build(Balance.bias, bias_step=0.01)
    run(model, tokens(2, 40))
    (first, *_) = k3.balancing(model)
    old, load = first.bias.clone(), first.counting.double()
    first.update()
    torch.testing.assert_close(first.bias - old, 0.01 * torch.sign(load.mean() - load))


def test_none_leaves_the_bias() -> None:
    model = build(Balance.none)
    run(model, tokens(2, 40))
    (first, *_) = k3.balancing(model)
    old = first.bias.clone()
    first.update()
    assert torch.equal(first.bias, old) and first.load.sum() == 2 * 40 * 2


def test_ema_averages_quantiles() -> None:
    model = build(ema=0.5)
    (first, *_) = k3.balancing(model)
    estimates = []
    for x in (tokens(2, 40), tokens(2, 41)):
        run(model, x)
        estimates.append(quantile.quantiles(first.histogram, first.bias, first.top_k))
        first.update()
    want = quantile.centre((0.25 * estimates[0] + 0.5 * estimates[1]) / 0.75)
    torch.testing.assert_close(first.bias, want)


def test_auxiliary_loss_moves_the_router_and_scales_with_the_share() -> None:
    x = tokens(2, 40)
    name = "layers.1.feed_forward.router.weight"

    def gradient(balance: Balance, weight: float, share: float) -> torch.Tensor:
        model = build(balance, aux_weight=weight)
        model(x, labels=x.roll(-1, 1), share=share).sum().backward()
        return dict(model.named_parameters())[name].grad

    plain, one, half = gradient(Balance.none, 1.0, 1.0), gradient(Balance.aux, 1.0, 1.0), gradient(Balance.aux, 1.0, 0.5)
    assert (one - plain).norm() > 1e-3
    torch.testing.assert_close(one - plain, 2 * (half - plain), rtol=1e-6, atol=1e-9)
