"""`optim.offload=cpu`: where everything lies, the same weights, and what the device is spared."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import optim
from optim import adamw_kernels
from optim.adamw_kernels import Update, by_torch, deepspeed, multi_tensor
from optim.config import (
    AdamWConfig,
    AdamWKernel,
    Offload,
    OptimConfig,
    OptimizerName,
    RouterConfig,
    ScheduleConfig,
    ScheduleName,
    WeightClipConfig,
)
from optim.optimizer import Optimizer
from parallel.clip import ClipTarget
from tests.optim import cases
from tests.optim.pretend_device import DEVICE, DeviceTensor, PretendDevice

Q, KV = "layers.0.q.weight", "layers.0.kv.weight"
TORCH = AdamWConfig(kernel=AdamWKernel.torch)
DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="the extra `deepspeed` is not installed")


def _cfg(offload: Offload, **changes: Any) -> OptimConfig:
    base = OptimConfig(
        lr=1e-2,
        offload=offload,
        adamw=TORCH,
        router=RouterConfig(lr_scale=1.0),
        schedule=ScheduleConfig(ScheduleName.constant),
        clip=WeightClipConfig(tau=2.0),
    )
    return dataclasses.replace(base, **changes)


def _trained(cfg: OptimConfig, dtype: torch.dtype, device: torch.device | str = "cpu", steps: int = 3) -> Optimizer:
    tensors = {n: torch.nn.Parameter(p.data.to(device)) for n, p in cases.parameters(dtype).items()}
    logits = torch.tensor([1.0, 3.0, -1.0, 8.0]).to(device)
    target = ClipTarget(Q, KV, nope=4, rope=4, value=8, max_logits=logits.clone())
    optimizer = optim.build(cfg, cases.table(tensors), steps=10, clip_targets=[target])
    for seed in range(steps):
        target.max_logits.copy_(logits)
        gradients = {n: p for n, p in cases.parameters(torch.float32, seed=seed + 1).items()}
        for name, p in tensors.items():
            p.main_grad = gradients[name].data.to(torch.promote_types(dtype, torch.float32)).to(device)  # type: ignore[attr-defined]
        report = optimizer.step()
        assert report.clipped_heads == 2 and (cfg.name is OptimizerName.adamw or report.update_rms[Q].shape == (4,))
    return optimizer


def _values(tensor: Tensor) -> Tensor:
    return tensor.values if isinstance(tensor, DeviceTensor) else tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", list(OptimizerName))
def test_weights_and_state_are_the_same_bit_for_bit(dtype: torch.dtype, name: OptimizerName) -> None:
    one, other = (_trained(_cfg(offload, name=name), dtype) for offload in Offload)
    assert one.state_dict().keys() == other.state_dict().keys()
    for key, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), key
    for key, p in one.parameters.items():
        assert torch.equal(p, other.parameters[key]), key
    assert set(other.masters) == set(other.parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_goes_from_one_to_the_other(dtype: torch.dtype) -> None:
    reference = _trained(_cfg(Offload.none), dtype, steps=2)
    for offload in Offload:
        there = _trained(_cfg(offload), dtype, steps=0)
        for name, p in there.parameters.items():
            p.data.copy_(reference.parameters[name].data)
        cases.take_over(there, reference.state_dict())
        for name, weight in there._weights().items():
            assert torch.equal(weight, reference._weights()[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_device_only_newton_schulz_runs_there(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    import optim.muon

    orthogonalised = []
    orthogonalise = optim.muon.orthogonalise
    monkeypatch.setattr(optim.muon, "orthogonalise", lambda x, **kw: (orthogonalised.append(x.device), orthogonalise(x, **kw))[1])
    with PretendDevice():
        here, away = (_trained(_cfg(offload), dtype, DEVICE) for offload in Offload)
    assert set(orthogonalised) == {DEVICE}
    for name in here.parameters:
        assert here.parameters[name].device == away.parameters[name].device == DEVICE
        assert torch.equal(_values(here.parameters[name].data), _values(away.parameters[name].data)), name
    counters = {"step", "skipped"}
    on_device = {n: t for n, t in here.state_dict().items() if t.device == DEVICE}
    assert not any(t.device == DEVICE for t in away.state_dict().values())
    assert not any(t.device == DEVICE for t in away.masters.values())
    assert {n for n in here.state_dict() if n not in on_device} == {
        n for n in here.state_dict() if n in counters or n.startswith("guard.") or n.endswith(".updates")
    }
    held, spared = optim.state.offloaded_bytes(away)
    assert spared == sum(t.nbytes for t in on_device.values())
    # a float32 weight on a device is its own master; in CPU memory it needs one
    assert held - spared == (sum(p.nbytes for p in here.parameters.values()) if dtype == torch.float32 else 0)
    assert f"{spared / 1e6:.3g} MB spared the device" in away.describe()


def test_the_device_refuses_what_a_device_refuses() -> None:
    with PretendDevice(), pytest.raises(RuntimeError, match="two devices"):
        torch.ones(3).to(DEVICE) + torch.ones(3)


def _update_case(count: int = 3) -> tuple[Update, list[list[Tensor]]]:
    gen = torch.Generator().manual_seed(0)
    shapes = [(1,), (37, 129), (4096,)]
    lists = [[torch.randn(shape, generator=gen) for shape in shapes] for _ in range(4)]
    lists[3] = [t.square() for t in lists[3]]
    return Update(AdamWConfig(), count, lr=1e-2, decay=0.1, scale=0.25), lists


@DEEPSPEED
@pytest.mark.slow  # compiles, where the machine has not yet
def test_deepspeed_makes_the_same_weights() -> None:
    for count in (1, 2, 50):
        update, ours = _update_case(count)
        _, theirs = _update_case(count)
        start = [w.clone() for w in ours[0]]
        by_torch(update, *ours)
        deepspeed(update, *theirs)
        for a, b, w in zip(ours[0], theirs[0], start):
            assert not torch.equal(a, w)
            assert ((a - b).abs() <= 2e-6 * (a - w).abs() + 2e-7 * w.abs()).all()  # a few roundings of the change and the sum
        for a, b in zip(ours[2] + ours[3], theirs[2] + theirs[3]):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    one, other = (
        _trained(_cfg(Offload.cpu, adamw=AdamWConfig(kernel=k)), torch.bfloat16) for k in (TORCH.kernel, AdamWKernel.auto)
    )
    assert "AdamW by DeepSpeedCPUAdam (deepspeed" in other.describe() and "AdamW by torch" in one.describe()
    for name in one.masters:
        torch.testing.assert_close(one.masters[name], other.masters[name], rtol=3e-7, atol=3e-8)


def test_without_deepspeed_torch_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw_kernels, "_absent", lambda package, name: f"{name} is not installed")
    assert "AdamW by torch" in _trained(_cfg(Offload.cpu, adamw=AdamWConfig()), torch.float32).describe()
    with pytest.raises(ValueError, match=r"optim\.adamw\.kernel=deepspeed: .*the extra `deepspeed` is not installed"):
        _trained(_cfg(Offload.cpu, adamw=AdamWConfig(kernel=AdamWKernel.deepspeed)), torch.float32)


@pytest.mark.parametrize(
    ("kernel", "dtype", "reason"),
    [
        (AdamWKernel.deepspeed, torch.float64, "it takes float32, and there are masters of float64"),
        (AdamWKernel.apex, torch.float32, "masters are not on a CUDA device"),
        (AdamWKernel.transformer_engine, torch.float32, "masters are not on a CUDA device"),
    ],
)
def test_a_kernel_that_cannot_run_is_refused(kernel: AdamWKernel, dtype: torch.dtype, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"optim\.adamw\.kernel={kernel.value}: .*{reason}"):
        _trained(_cfg(Offload.cpu, adamw=AdamWConfig(kernel=kernel)), dtype)


def test_deepspeed_needs_offloading() -> None:
    cfg = _cfg(Offload.none, adamw=AdamWConfig(kernel=AdamWKernel.deepspeed))
    with PretendDevice(), pytest.raises(ValueError, match=r"masters are not in CPU memory; give optim\.offload=cpu"):
        _trained(cfg, torch.float32, DEVICE)


def test_the_lock_of_a_killed_build_does_not_hold_anyone_up(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    with subprocess.Popen(["sleep", "60"], cwd=tmp_path) as builder:  # as ninja does while it builds
        adamw_kernels.clear_stale_lock(tmp_path)
        assert lock.exists()
        builder.kill()
    adamw_kernels.clear_stale_lock(tmp_path)
    assert not lock.exists()


def test_the_contract_of_the_fused_kernels() -> None:
    """Neither Transformer Engine nor apex runs without a GPU: their kernel's documented arguments, and what it makes of them."""

    def kernel(chunk: int, flag: Tensor, lists: list[list[Tensor]], lr: float, beta1: float, beta2: float, eps: float, step: int,
               mode: int, bias_correction: int, decay: float) -> None:  # fmt: skip
        assert chunk == 65536 and flag.dtype == torch.int32 and mode == bias_correction == 1
        for g, p, m, v in zip(*lists):
            parameter = torch.nn.Parameter(p)
            parameter.grad = g
            adamw = torch.optim.AdamW([parameter], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay)
            adamw.state[parameter] = {"step": torch.tensor(float(step - 1)), "exp_avg": m, "exp_avg_sq": v}
            adamw.step()

    def apply(op: Any, flag: Tensor, lists: list[list[Tensor]], *args: Any) -> None:
        op(65536, flag, lists, *args)

    update, ours = _update_case()
    _, theirs = _update_case()
    by_torch(update, *ours)
    multi_tensor(lambda: (apply, kernel))(update, *theirs)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
