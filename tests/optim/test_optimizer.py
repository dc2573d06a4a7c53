"""One optimizer step as a whole: its order, masters, skipped steps, and a state that continues bit for bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import optim
from optim.config import MuonConfig, OptimConfig, OptimizerName, RouterConfig, ScheduleConfig, ScheduleName, WeightClipConfig
from parallel.clip import ClipTarget
from tests.optim import cases

Q, KV, NORM = "layers.0.q.weight", "layers.0.kv.weight", "layers.0.norm.weight"


class _Balancer:
    """Notes what it is told, and the weight it sees at that moment."""

    def __init__(self, weight: Tensor):
        self.weight, self.calls, self.seen = weight, [], torch.zeros(0)

    def update(self) -> None:
        self.calls.append("update")
        self.seen = self.weight.detach().clone()

    def reset(self) -> None:
        self.calls.append("reset")


def _target() -> ClipTarget:
    return ClipTarget(Q, KV, nope=4, rope=4, value=8, max_logits=torch.full((4,), -torch.inf))


def _cfg(**changes: object) -> OptimConfig:
    return dataclasses.replace(
        OptimConfig(router=RouterConfig(lr_scale=1.0), schedule=ScheduleConfig(ScheduleName.constant)), **changes
    )


def _snapshot(tensors: dict[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in tensors.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", list(OptimizerName))
def test_a_quadratic_is_minimised(dtype: torch.dtype, name: OptimizerName) -> None:
    tensors = cases.parameters(dtype)
    cfg = OptimConfig(name=name, lr=0.2, weight_decay=0.0, schedule=ScheduleConfig(min_lr=0.0))
    optimizer = optim.build(cfg, cases.table(tensors), steps=100)
    start = sum(float(p.detach().double().square().sum()) for p in tensors.values())
    for _ in range(100):
        for p in tensors.values():
            p.grad = None
        sum(p.square().sum() for p in tensors.values()).backward()
        report = optimizer.step()
    end = sum(float(p.detach().double().square().sum()) for p in tensors.values())
    assert end < 1e-2 * start
    assert report.step == 100 == optimizer.step_count and not report.skipped


def test_working_weights_are_the_cast_of_fp32_masters() -> None:
    tensors = cases.parameters(torch.bfloat16)
    optimizer = optim.build(_cfg(lr=1e-4), cases.table(tensors), steps=20)
    full = {n: torch.nn.Parameter(p.detach().float()) for n, p in tensors.items()}
    reference = optim.build(_cfg(lr=1e-4), cases.table(full), steps=20)
    assert not reference.masters and set(optimizer.masters) == set(tensors)
    for seed in range(20):
        cases.give_gradients(tensors, seed)
        for name, p in full.items():
            p.grad = tensors[name].grad.float()
        optimizer.step()
        reference.step()
    for name, p in tensors.items():
        master = optimizer.masters[name]
        assert master.dtype == torch.float32 and p.dtype == torch.bfloat16
        assert torch.equal(p.data, master.bfloat16())
        torch.testing.assert_close(master, full[name].data, rtol=1e-5, atol=1e-6)  # small steps are not lost to bf16


def test_only_bf16_parameters_have_masters() -> None:
    tensors = cases.parameters(torch.bfloat16)
    tensors[NORM] = torch.nn.Parameter(tensors[NORM].detach().float())
    optimizer = optim.build(_cfg(), cases.table(tensors), steps=1)
    assert NORM not in optimizer.masters and len(optimizer.masters) == len(tensors) - 1
    before = _snapshot(tensors)
    cases.give_gradients(tensors, 0)
    optimizer.step()
    assert all(not torch.equal(before[n], p) for n, p in tensors.items())


def test_float16_is_refused() -> None:
    with pytest.raises(ValueError, match=r"is torch.float16; the optimizer trains"):
        optim.build(_cfg(), cases.table(cases.parameters(torch.float16)), steps=1)


def test_gradients_are_clipped_by_their_global_norm() -> None:
    tensors = cases.parameters(torch.float64)
    optimizer = optim.build(_cfg(grad_clip=2.0), cases.table(tensors), steps=1)
    cases.give_gradients(tensors, 0, scale=3.0)
    gradients = {n: p.grad.clone() for n, p in tensors.items()}
    norm = float(torch.cat([g.flatten() for g in gradients.values()]).norm())
    report = optimizer.step()
    assert report.grad_norm == pytest.approx(norm, rel=1e-12)
    assert report.clip_coefficient == pytest.approx(2.0 / norm, rel=1e-12)
    torch.testing.assert_close(optimizer.muon.momentum[Q], gradients[Q] * (2.0 / norm))
    torch.testing.assert_close(optimizer.adamw.exp_avg[NORM], 0.1 * gradients[NORM] * (2.0 / norm))
    assert all(torch.equal(p.grad, gradients[n]) for n, p in tensors.items())  # the buffers themselves are not touched


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bad_gradient_skips_the_step_and_touches_nothing(dtype: torch.dtype, bad: float) -> None:
    tensors = cases.parameters(dtype)
    target, balancer = _target(), _Balancer(tensors[Q])
    optimizer = optim.build(_cfg(), cases.table(tensors), steps=9, clip_targets=[target], balancing=balancer)
    cases.give_gradients(tensors, 0)
    optimizer.step()
    weights, state = _snapshot(tensors), {n: t.clone() for n, t in optimizer.state_dict().items()}
    cases.give_gradients(tensors, 1)
    tensors[NORM].grad[3] = bad
    target.max_logits.copy_(torch.full((4,), 1e6))
    report = optimizer.step()
    assert report.skipped and report.update_rms == {} and report.step == 2 and optimizer.skipped_count == 1
    assert all(torch.equal(weights[n], p) for n, p in tensors.items())
    for name, tensor in optimizer.state_dict().items():
        assert torch.equal(tensor, state[name]) != (name in ("step", "skipped")), name
    assert balancer.calls == ["update", "reset"]
    assert target.max_logits.tolist() == [-torch.inf] * 4  # what a bad batch showed must not clip the next step
    cases.give_gradients(tensors, 2)
    assert not optimizer.step().skipped


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_clip_edits_master_and_working_copy_after_the_update(dtype: torch.dtype) -> None:
    runs = []
    for tau in (100.0, 10.0):
        tensors = cases.parameters(dtype)
        target, balancer = _target(), _Balancer(tensors[Q])
        cfg = _cfg(clip=WeightClipConfig(tau=tau))
        optimizer = optim.build(cfg, cases.table(tensors), steps=1, clip_targets=[target], balancing=balancer)
        cases.give_gradients(tensors, 0)
        target.max_logits.copy_(torch.tensor([40.0, 1.0, 1.0, 1.0]))
        report = optimizer.step()
        assert torch.equal(balancer.seen, tensors[Q].detach())  # balancers come last
        runs.append((tensors, optimizer.masters, report))
    (free, free_masters, free_report), (clipped, masters, report) = runs
    assert (free_report.clipped_heads, report.clipped_heads) == (0, 1)
    assert free_report.max_logit == report.max_logit == 40.0
    before = free_masters.get(Q, free[Q].data).view(4, 8, -1)
    after = masters.get(Q, clipped[Q].data).view(4, 8, -1)
    torch.testing.assert_close(after[0, :4], before[0, :4] * 0.5)
    torch.testing.assert_close(after[0, 4:], before[0, 4:] * 0.25)
    assert torch.equal(after[1:], before[1:])
    for name in masters:
        assert torch.equal(clipped[name].data, masters[name].bfloat16())


def test_main_grad_is_preferred() -> None:
    tensors = cases.parameters(torch.bfloat16)
    optimizer = optim.build(_cfg(grad_clip=0.0), cases.table(tensors), steps=1)
    cases.give_gradients(tensors, 0)
    for p in tensors.values():
        p.main_grad = torch.full(p.shape, 0.5)
    optimizer.step()
    torch.testing.assert_close(optimizer.muon.momentum[Q], torch.full((32, 32), 0.5))


def test_no_gradient_leaves_a_parameter_untouched_and_a_zero_one_only_decays_it() -> None:
    tensors = cases.parameters(torch.float64)
    optimizer = optim.build(_cfg(lr=0.01), cases.table(tensors), steps=2)
    before = _snapshot(tensors)
    report = optimizer.step()
    assert report.grad_norm == 0.0 and not report.skipped and report.update_rms == {}
    assert all(torch.equal(before[n], p) for n, p in tensors.items())
    for p in tensors.values():
        p.main_grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in tensors.items():
        factor = 1 - 0.01 * 0.1 if name != NORM else 1.0
        torch.testing.assert_close(p.data, before[name] * factor, rtol=1e-14, atol=0)


def test_learning_rate_follows_the_schedule_and_the_router_its_own() -> None:
    tensors = cases.parameters(torch.float64)
    cfg = OptimConfig(lr=0.01, schedule=ScheduleConfig(warmup=0.5, min_lr=0.0))
    cfg.router.lr_scale = 0.5
    optimizer = optim.build(cfg, cases.table(tensors), steps=4)
    cases.give_gradients(tensors, 0)
    before = _snapshot(tensors)
    report = optimizer.step()
    assert report.lr == pytest.approx(0.005)
    router = "layers.0.router.weight"
    moved = tensors[router].detach() - before[router] * (1 - 0.0025 * 0.1)
    torch.testing.assert_close(moved.abs(), torch.full_like(moved, 0.0025), rtol=1e-3, atol=0)
    assert [optimizer.step().lr for _ in range(3)] == pytest.approx([0.01, 0.005, 0.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_restored_state_continues_bit_for_bit(dtype: torch.dtype) -> None:
    tensors = cases.parameters(dtype)
    optimizer = optim.build(OptimConfig(), cases.table(tensors), steps=10)
    for seed in range(3):
        cases.give_gradients(tensors, seed)
        optimizer.step()
    saved = {n: t.clone() for n, t in optimizer.state_dict().items()}
    lost = dtype == torch.bfloat16  # those weights come back from their masters
    other = {n: torch.nn.Parameter(p.detach().clone() * (not lost)) for n, p in tensors.items()}
    resumed = optim.build(OptimConfig(), cases.table(other), steps=10)
    cases.take_over(resumed, saved)
    assert all(torch.equal(p, other[n]) for n, p in tensors.items())
    for seed in range(3, 6):
        for run, params in ((optimizer, tensors), (resumed, other)):
            cases.give_gradients(params, seed)
            report = run.step()
        assert report.step == seed + 1
    assert all(torch.equal(p, other[n]) for n, p in tensors.items())
    assert all(torch.equal(t, resumed.state_dict()[n]) for n, t in optimizer.state_dict().items())
    assert not any(torch.equal(saved[n], t) for n, t in optimizer.state_dict().items() if n.endswith("momentum"))


def test_state_names() -> None:
    optimizer = optim.build(OptimConfig(), cases.table(cases.parameters(torch.bfloat16)), steps=1)
    names = set(optimizer.state_dict())
    assert {"step", "skipped", f"{Q}.momentum", f"{Q}.master", f"{NORM}.exp_avg", f"{NORM}.exp_avg_sq"} <= names
    assert f"{NORM}.momentum" not in names and f"{Q}.exp_avg" not in names


def test_dials_out_of_range_are_all_named() -> None:
    cfg = OptimConfig(lr=0.0, weight_decay=-1.0, muon=MuonConfig(momentum=1.0), clip=WeightClipConfig(tau=0.0))
    with pytest.raises(ValueError) as error:
        optim.build(cfg, cases.table(cases.parameters()), steps=1)
    for part in ("optim.lr=0.0", "optim.weight_decay=-1.0", "optim.muon.momentum=1.0", "optim.clip.tau=0.0"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="weight clip"):
        wrong = dataclasses.replace(_target(), nope=5)
        optim.build(OptimConfig(), cases.table(cases.parameters()), steps=1, clip_targets=[wrong])


def test_description_is_the_table() -> None:
    text = optim.build(OptimConfig(), cases.table(cases.parameters()), steps=1).describe()
    assert all(name.replace(".0.", ".*.") in text for name in cases.KINDS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "rows"), [(Q, 8), (KV, 12)])
def test_without_clipping_a_loud_head_changes_no_bit_of_the_others(name: str, rows: int, dtype: torch.dtype) -> None:
    cfg = _cfg(grad_clip=0.0, clip=WeightClipConfig(enabled=False))
    calm, loud = cases.parameters(dtype), cases.parameters(dtype)
    optimizers = [optim.build(cfg, cases.table(tensors), steps=3) for tensors in (calm, loud)]
    for seed in (1, 2):
        for tensors, optimizer in zip((calm, loud), optimizers):
            cases.give_gradients(tensors, seed)
            if tensors is loud:
                tensors[name].grad[rows : 2 * rows] *= 1000  # the second head's
            optimizer.step()
    for other in calm:
        same = calm[other] == loud[other]
        if other == name:
            assert same[:rows].all() and same[2 * rows :].all() and not same[rows : 2 * rows].all()
        else:
            assert same.all(), other
