"""AdamW against torch's own."""

import pytest
import torch

from optim import adamw as module
from optim.adamw import AdamW
from optim.config import Offload, OptimConfig, OptimizerName, RouterConfig
from optim.home import Home
from optim.table import assign
from parallel.cards import Optimizer
from parallel.shards import Shards
from tests.optim import cases

EVEN = OptimConfig(router=RouterConfig(lr_scale=1.0))  # one learning rate for all


def _adamw(tensors: dict[str, torch.nn.Parameter], weights: dict[str, torch.Tensor], cfg: OptimConfig = EVEN) -> AdamW:
    cards = cases.table(tensors)
    home = Home(Offload.none, torch.device("cpu"))
    return AdamW(cfg, assign(cards, cfg).of(Optimizer.ADAMW), weights, Shards.whole(cards), home)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("limit", [1 << 26, 1000])
def test_equals_torch(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, limit: int) -> None:
    monkeypatch.setattr(module, "BATCH_ELEMENTS", limit)
    ours, theirs = cases.parameters(dtype), cases.parameters(dtype)
    cards = cases.table(ours)
    weights = {n: p.data for n, p in ours.items()}
    optimizer = _adamw(ours, weights, OptimConfig(name=OptimizerName.adamw, router=EVEN.router))
    groups = [
        {"params": [p for n, p in theirs.items() if cards[n].decay == decays], "weight_decay": 0.1 if decays else 0.0}
        for decays in (True, False)
    ]
    reference = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    for seed in range(4):
        cases.give_gradients(theirs, seed)
        gradients = {n: p.grad * 4 for n, p in theirs.items() if p.grad is not None}
        optimizer.step(weights, gradients, lr=0.01, decay=0.1, scale=0.25)  # the scale undoes the 4
        reference.step()
    for name, p in theirs.items():
        torch.testing.assert_close(weights[name], p.data, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-14)


def test_a_late_gradient_starts_like_a_fresh_one() -> None:
    tensors = cases.parameters()
    weights = {n: p.data for n, p in tensors.items()}
    optimizer = _adamw(tensors, weights)
    norm, router = "layers.0.norm.weight", "layers.0.router.weight"
    before = weights[norm].clone()
    for _ in range(5):
        optimizer.step(weights, {router: torch.ones(3, 32)}, lr=0.01, decay=0.1, scale=1.0)
    assert torch.equal(weights[norm], before) and not optimizer.exp_avg[norm].any()
    optimizer.step(weights, {norm: torch.full((32,), 7.0)}, lr=0.01, decay=0.1, scale=1.0)
    torch.testing.assert_close(weights[norm], before - 0.01, rtol=0, atol=1e-6)  # a first step is lr times the sign


def test_a_zero_gradient_does_nothing_but_decay() -> None:
    tensors = cases.parameters(torch.float64)
    weights = {n: p.data for n, p in tensors.items()}
    before = {n: w.clone() for n, w in weights.items()}
    optimizer = _adamw(tensors, weights)
    optimizer.step(weights, {n: torch.zeros_like(w) for n, w in weights.items()}, lr=0.01, decay=0.1, scale=1.0)
    assert torch.equal(weights["layers.0.norm.weight"], before["layers.0.norm.weight"])
    torch.testing.assert_close(weights["layers.0.router.weight"], before["layers.0.router.weight"] * (1 - 0.001))
