"""The loss of RL and of distillation equals the written formula, token by token, and so does its gradient."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

import parallel
from parallel.config import ParallelConfig
from parallel.local import Helper
from recipes.rl.batch import PolicyBatch
from recipes.rl.objective import NAMES, PolicyObjective

LOW, HIGH, TAU, LIMIT = 0.8, 1.25, 0.1, 2.0
B, T, V = 3, 7, 11


def batch_of(seed: int = 0, taught: bool = False) -> tuple[Tensor, PolicyBatch]:
    """(logits [B, T, V] of a policy, a batch whose ratios lie on both sides of both clips)."""
    draw = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)
    logits = normal(B, T, V)
    labels = torch.randint(V, (B, T), generator=draw)
    mask = torch.rand(1, B, T, generator=draw) < 0.7
    log_p = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    fresh = torch.rand(B, T, generator=draw) < 0.5
    more = {"teacher": log_p + 3 * normal(B, T), "baseline": normal(B, T)} if taught else {"advantage": normal(B, T)}
    return logits, PolicyBatch(
        labels, labels, torch.zeros(B, T, dtype=torch.bool), mask, None, behaviour=log_p + 0.3 * normal(B, T), fresh=fresh, **more
    )


def objective() -> PolicyObjective:
    return PolicyObjective((1.0,), parallel.start(ParallelConfig(dp=1), "cpu"), low=LOW, high=HIGH, tau=TAU, limit=LIMIT)


def losses_of(logits: Tensor, batch: PolicyBatch) -> Tensor:
    return -logits.log_softmax(-1).gather(-1, batch.labels[..., None])[..., 0][None]


def directly(logits: Tensor, batch: PolicyBatch, count: float) -> tuple[Tensor, dict[str, float]]:
    """The formula, one token after another."""
    total, sums, worst = logits.new_zeros(()), dict.fromkeys(NAMES[:-1], 0.0), 0.0
    for b in range(B):
        for t in range(T):
            if not batch.loss_mask[0, b, t]:
                continue
            log_p = torch.log_softmax(logits[b, t], -1)[batch.labels[b, t]]
            log_ratio = log_p - batch.behaviour[b, t]
            rho, now = torch.exp(log_ratio), float(log_p.detach())
            was = float(rho.detach())
            if batch.teacher is not None:
                assert batch.baseline is not None
                advantage = max(-LIMIT, min(LIMIT, float(batch.teacher[b, t]) - now)) - float(batch.baseline[b, t])
            else:
                assert batch.advantage is not None
                advantage = float(batch.advantage[b, t])
            inside = LOW <= was <= HIGH
            kept = rho if inside else torch.tensor(min(max(was, LOW), HIGH), dtype=torch.float64)
            token = -kept * advantage + TAU * log_ratio**2
            total = total + token
            values = (token.detach(), was, not inside, was - 1 - log_ratio.detach(), -now, advantage)
            for name, value in zip(sums, values):
                sums[name] += float(value) / count
            if batch.fresh[b, t]:
                worst = max(worst, abs(float(log_ratio.detach())))
    return total / count, {**sums, "policy/mismatch": worst}


@pytest.mark.parametrize("taught", [False, True])
def test_loss_gradient_and_report_are_the_formulas(taught: bool) -> None:
    logits, batch = batch_of(taught=taught)
    o = objective()
    own, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    counts = o.denominators([batch])
    assert counts.tolist() == [float(batch.loss_mask.sum())]
    loss, parts = o.share(losses_of(own, batch), counts, batch)
    expected, named = directly(theirs, batch, float(counts[0]))
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(own.grad, theirs.grad, rtol=1e-10, atol=1e-14)
    assert not own.grad[~batch.loss_mask[0]].any()
    assert dict(zip(o.names, o.total([parts]))) == pytest.approx(named, rel=1e-12)
    assert 0 < named["policy/clipped"] < 1


@pytest.mark.parametrize("taught", [False, True])
def test_a_row_drawn_three_times_is_three_rows(taught: bool) -> None:
    logits, batch = batch_of(taught=taught)
    often = torch.tensor([1, 3, 2])
    rows = {f.name: getattr(batch, f.name) for f in fields(batch) if getattr(batch, f.name) is not None}
    three = PolicyBatch(**{"padding": None} | {
        name: value.repeat_interleave(often, 1 if name == "loss_mask" else 0) for name, value in rows.items()
    })  # fmt: skip
    once = replace(batch, times=often[:, None].double().expand(B, T))
    o = objective()
    found = []
    for weights, one in ((logits, once), (logits.repeat_interleave(often, 0), three)):
        counts = o.denominators([one])
        assert counts.tolist() == [float((often[:, None] * batch.loss_mask[0]).sum())]
        own = weights.clone().requires_grad_()
        loss, parts = o.share(losses_of(own, one), counts, one)
        loss.backward()
        assert own.grad is not None
        found.append((loss.detach(), parts, own.grad))
    (loss, parts, gradient), (of_three, their_parts, gradients) = found
    torch.testing.assert_close(loss, of_three, rtol=1e-12, atol=0)
    torch.testing.assert_close(parts, their_parts, rtol=1e-12, atol=0)
    summed = torch.stack([part.sum(0) for part in gradients.split(often.tolist())])
    torch.testing.assert_close(gradient, summed, rtol=1e-12, atol=1e-15)


def test_micro_batches_add_up_and_the_mismatch_is_their_largest() -> None:
    o = objective()
    (one, first), (two, second) = batch_of(1), batch_of(2)
    counts = o.denominators([first, second])
    shares = [o.share(losses_of(logits, batch), counts, batch) for logits, batch in ((one, first), (two, second))]
    total = dict(zip(o.names, o.total([parts for _, parts in shares])))
    each = [directly(logits, batch, float(counts[0]))[1] for logits, batch in ((one, first), (two, second))]
    for name in NAMES[:-1]:
        assert total[name] == pytest.approx(each[0][name] + each[1][name], rel=1e-12)
    assert total["policy/mismatch"] == max(each[0]["policy/mismatch"], each[1]["policy/mismatch"])


def test_outside_the_clip_only_the_regulariser_pulls() -> None:
    """Whatever the advantage's sign: a stale token is drawn back to the policy it came from, and not pushed on."""
    for offset, advantage in ((1.0, 1.0), (1.0, -1.0), (-1.0, 1.0), (-1.0, -1.0)):
        logits, batch = batch_of(3)
        log_p = -losses_of(logits, batch)[0]
        one = PolicyBatch(
            batch.tokens, batch.labels, batch.document_starts, batch.loss_mask, None,
            behaviour=log_p - offset, fresh=torch.zeros_like(batch.fresh), advantage=torch.full((B, T), advantage).double(),
        )  # fmt: skip
        losses = losses_of(logits, one).requires_grad_()
        o = objective()
        loss, parts = o.share(losses, o.denominators([one]), one)
        loss.backward()
        mask = one.loss_mask
        count = int(mask.sum())
        expected = torch.full((count,), -2 * TAU * offset / count, dtype=torch.float64)  # d/d(-log p)
        torch.testing.assert_close(losses.grad[mask], expected, rtol=1e-9, atol=0)
        assert parts[-1] == 0, "no token is fresh"


@pytest.mark.parametrize("baseline", [None, 0.7])
def test_distillation_is_the_gradient_of_the_reverse_divergence(baseline: float | None) -> None:
    """On tokens that the policy itself draws, averaged over all it could draw: KL(student || teacher), by autograd. Whatever its
    advantages are compared with.
    """
    draw = torch.Generator().manual_seed(0)
    student = torch.randn(V, generator=draw, dtype=torch.float64).requires_grad_()
    teacher = (student.detach() + 0.3 * torch.randn(V, generator=draw, dtype=torch.float64)).log_softmax(-1)
    divergence = (student.log_softmax(-1).exp() * (student.log_softmax(-1) - teacher)).sum()
    (expected,) = torch.autograd.grad(divergence, student)
    o = PolicyObjective((1.0,), objective().world, low=LOW, high=HIGH, tau=0.0, limit=100.0)
    found = torch.zeros(V, dtype=torch.float64)
    for token in range(V):
        label = torch.tensor([[token]])
        log_p = student.log_softmax(-1)[token]
        batch = PolicyBatch(
            label, label, torch.ones(1, 1, dtype=torch.bool), torch.ones(1, 1, 1, dtype=torch.bool), None,
            behaviour=log_p.detach().view(1, 1), fresh=torch.ones(1, 1, dtype=torch.bool), teacher=teacher[token].view(1, 1),
            baseline=None if baseline is None else torch.full((1, 1), baseline, dtype=torch.float64),
        )  # fmt: skip
        loss, _ = o.share(-log_p.view(1, 1, 1), o.denominators([batch]), batch)
        found += math.exp(float(log_p.detach())) * torch.autograd.grad(loss, student)[0]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


def test_a_step_without_a_counted_token_is_zero() -> None:
    logits, batch = batch_of()
    none = PolicyBatch(
        batch.tokens, batch.labels, batch.document_starts, torch.zeros_like(batch.loss_mask), None,
        behaviour=batch.behaviour, fresh=batch.fresh, advantage=batch.advantage,
    )  # fmt: skip
    o = objective()
    own = logits.requires_grad_()
    loss, parts = o.share(losses_of(own, none), o.denominators([none]), none)
    loss.backward()
    assert loss == 0 and not own.grad.any() and o.total([parts]) == [0.0] * len(NAMES)


def test_ranks_divide_by_the_global_count_and_take_the_largest_mismatch(helper: Helper) -> None:
    """Each data rank has one of two batches; all report what one process reports of both."""
    o = objective()
    of = [batch_of(seed) for seed in (1, 2)]
    counts = o.denominators([batch for _, batch in of])
    whole = o.total([o.share(losses_of(logits, batch), counts, batch)[1] for logits, batch in of])
    for found in helper.run_ranks("tests.recipes.rl.ranks:reported", 2):
        assert found == pytest.approx(whole, rel=1e-12)
