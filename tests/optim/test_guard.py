"""The guard: what counts as a spike, what a skipped step leaves alone, and that a restored record decides alike."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

import optim
from optim.config import GuardConfig, OptimConfig, OptimizerName, RouterConfig, ScheduleConfig, ScheduleName
from optim.guard import Guard
from tests.optim import cases

QUICK = GuardConfig(window=8, min_steps=4)


def _guard(cfg: GuardConfig, losses: list[float], norms: list[float]) -> Guard:
    guard = Guard(cfg)
    for loss, norm in zip(losses, norms, strict=True):
        assert guard.objection(finite=True, loss=loss, norm=norm) is None
        guard.accept(loss=loss, norm=norm)
    return guard


def test_what_is_not_finite_is_refused_from_the_first_step_and_switched_off_too() -> None:
    for cfg in (QUICK, replace(QUICK, enabled=False)):
        guard = Guard(cfg)
        assert guard.objection(finite=False, loss=1.0, norm=1.0) == "the loss is not finite"
        assert guard.objection(finite=True, loss=math.nan, norm=1.0) == "the loss is not finite"
        for norm in (math.nan, math.inf):
            assert guard.objection(finite=True, loss=1.0, norm=norm) == "the gradient norm is not finite"
        assert guard.objection(finite=True, loss=1.0, norm=1.0) is None


def test_a_spike_is_named_with_its_size() -> None:
    guard = _guard(QUICK, [3.0, 3.1, 2.9, 3.0], [1.0, 1.1, 0.9, 1.0])
    assert (
        guard.objection(finite=True, loss=3.0, norm=37.0)
        == "spike of the gradient norm, 37 times the median of the last 4 (limit 5)"
    )
    assert guard.objection(finite=True, loss=6.0, norm=1.0) == "spike of the loss, 2 times the median of the last 4 (limit 1.3)"
    assert guard.objection(finite=True, loss=3.8, norm=4.9) is None, "large, but under both factors"
    assert guard.objection(finite=True, loss=None, norm=1.0) is None, "a caller without a loss is guarded by the norm alone"
    off = _guard(replace(QUICK, enabled=False), [3.0] * 4, [1.0] * 4)
    assert off.objection(finite=True, loss=1e9, norm=1e9) is None


def test_the_spread_protects_noisy_runs() -> None:
    norms = [1.0, 9.0, 2.0, 7.0, 1.0, 4.0, 3.0, 8.0]  # median 3.5, MAD 2.5: 6 deviations are 22
    guard = _guard(QUICK, [3.0] * 8, norms)
    assert guard.objection(finite=True, loss=3.0, norm=25.0) is None
    assert guard.objection(finite=True, loss=3.0, norm=26.0) is not None


def test_nothing_is_a_spike_before_enough_steps_were_accepted() -> None:
    guard = _guard(QUICK, [3.0] * 3, [1.0] * 3)
    assert guard.objection(finite=True, loss=1e9, norm=1e9) is None
    guard.accept(loss=3.0, norm=1.0)
    assert guard.objection(finite=True, loss=3.0, norm=1e9) is not None


def test_only_the_last_accepted_steps_count() -> None:
    guard = _guard(QUICK, [3.0] * 8, [1.0] * 8)
    for norm in (2.0, 2.0, 2.0, 2.0, 2.0, 2.0):
        guard.accept(loss=3.0, norm=norm)
    assert guard.objection(finite=True, loss=3.0, norm=9.0) is None, "under five times the median of now, 2"
    assert (
        guard.objection(finite=True, loss=3.0, norm=11.0)
        == "spike of the gradient norm, 5.5 times the median of the last 8 (limit 5)"
    )


def test_losses_at_or_below_zero() -> None:
    guard = _guard(QUICK, [-2.0, -2.1, -1.9, -2.0], [0.0] * 4)
    assert guard.objection(finite=True, loss=1.0, norm=0.0) == "spike of the loss, 3 above the median of the last 4 (limit 0.6)"
    assert guard.objection(finite=True, loss=-1.9, norm=5.0) is None, "zeros alone are no yardstick"


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_warm_up_is_let_through(seed: int) -> None:
    """Losses from ln V down, norms that first rise eightfold and then fall, with heavy-tailed noise on both."""
    draw = random.Random(seed)
    guard = Guard(GuardConfig())
    for step in range(1500):
        loss = 2.0 + 9.0 * math.exp(-step / 60) + draw.gauss(0, 0.15)
        norm = (0.5 + 3.5 * min(1, step / 40) * math.exp(-step / 200)) * math.exp(draw.gauss(0, 0.3))
        assert guard.objection(finite=True, loss=loss, norm=norm) is None, step
        guard.accept(loss=loss, norm=norm)


@pytest.mark.parametrize("name", list(OptimizerName))
def test_a_spike_skips_the_step_and_a_restored_record_decides_alike(name: OptimizerName) -> None:
    tensors = cases.parameters(torch.bfloat16)
    cfg = OptimConfig(
        name=name, guard=QUICK, router=RouterConfig(lr_scale=1.0), schedule=ScheduleConfig(ScheduleName.constant)
    )  # fmt: skip
    optimizer = optim.build(cfg, cases.table(tensors), steps=20)
    for seed in range(5):
        cases.give_gradients(tensors, seed)
        assert not optimizer.step(loss=3.0 - seed / 10).skipped
    saved = {n: t.clone() for n, t in optimizer.state_dict().items()}
    weights = {n: p.detach().clone() for n, p in tensors.items()}
    resumed = optim.build(cfg, cases.table({n: torch.nn.Parameter(w) for n, w in weights.items()}), steps=20)
    cases.take_over(resumed, saved)
    for run, parameters in ((optimizer, tensors), (resumed, resumed.parameters)):
        cases.give_gradients(parameters, 5, scale=100.0)
        report = run.step(loss=2.4)
        assert report.skipped and report.reason.startswith(
            "spike of the gradient norm, 99.9 times the median of the last 5 (limit "
        )
        cases.give_gradients(parameters, 5)
        report = run.step(loss=24.0)
        assert report.reason.startswith("spike of the loss, 8.57 times the median of the last 5 (limit ") and report.step == 7
        changed = {n for n, t in run.state_dict().items() if not torch.equal(t, saved[n])}
        assert changed == {"step", "skipped"} and run.skipped_count == 2
        assert all(torch.equal(p, weights[n]) for n, p in parameters.items())
        cases.give_gradients(parameters, 6)
        report = run.step(loss=2.4)
        assert not report.skipped and report.reason is None
    assert all(torch.equal(t, resumed.state_dict()[n]) for n, t in optimizer.state_dict().items())


def test_dials_out_of_range_are_named() -> None:
    cfg = OptimConfig(guard=GuardConfig(window=8, grad_norm=1.0, loss=0.5, deviations=-1.0, max_skipped=0))
    with pytest.raises(ValueError) as error:
        optim.build(cfg, cases.table(cases.parameters()), steps=1)
    for key in ("min_steps=32", "grad_norm=1.0", "loss=0.5", "deviations=-1.0", "max_skipped=0"):
        assert f"optim.guard.{key}: must" in str(error.value)
