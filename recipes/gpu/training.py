"""The checks of `make gpu-check` that train, whole steps: here against the CPU, in bf16 and in low precision."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

import torch

import k3
import parallel
from data.batch import StepBatch
from k3.config import K3Config, MLAConfig
from k3.low_precision import LowPrecision
from optim.config import OptimConfig
from recipes.assemble import assemble
from recipes.config import ProofDocuments, ProveConfig
from recipes.gpu.tools import Skipped, distance, on_cpu
from recipes.precision import found, unfit
from recipes.proof.batches import Batches
from recipes.trainer import StepResult, Trainer


class Same(Batches):
    """The first step's batch again and again, so that its loss must fall."""

    def __next__(self) -> StepBatch:
        self.position = 0
        return super().__next__()


def trained(
    model: K3Config, device: torch.device, dtype: torch.dtype, steps: int, data: ProveConfig, lr: float | None = None,
    low: LowPrecision | None = None,
) -> tuple[list[StepResult], k3.Model]:  # fmt: skip
    world = parallel.start(device=device.type)
    dials = OptimConfig() if lr is None else OptimConfig(lr=lr)
    parts = assemble(model, dials, world, dtype=dtype, seed=0, steps=steps, low_precision=low)
    trainer = Trainer(parts.model, parts.optimizer, Same(data, model.vocab_size, parts.objective.horizon), parts.objective)
    trainer.module.train()
    out = [trainer.train_step() for _ in range(steps)]
    return out, parts.model.module  # type: ignore[return-value]


def trace(device: torch.device) -> str:
    """Losses of three float64 steps of the tiny model, and two projections of every weight after them, as JSON."""
    data = ProveConfig(batch=4, length=64, accumulation=2)
    results, model = trained(k3.preset("tiny"), device, torch.float64, 3, data)
    weights = {}
    for name, p in k3.construct.unwrap(model).named_parameters():
        directions = torch.randn(2, p.numel(), generator=torch.Generator().manual_seed(p.numel()), dtype=torch.float64)
        weights[name] = (directions @ p.detach().cpu().double().flatten()).tolist()
    return json.dumps({"losses": [r.losses for r in results], "weights": weights})


def steps(device: torch.device) -> str:
    with tempfile.TemporaryDirectory() as folder, on_cpu("trace", Path(folder) / "trace.json") as answer:
        own = json.loads(trace(device))
        other = json.loads(answer())
    loss = max(abs(a - b) for x, y in zip(own["losses"], other["losses"]) for a, b in zip(x, y))
    assert loss < 1e-9, f"losses differ by {loss:.1e}: here {own['losses']}, on the CPU {other['losses']}"
    off = {n: distance(torch.tensor(v), torch.tensor(other["weights"][n])) for n, v in own["weights"].items()}
    worst = max(off, key=lambda name: off[name])
    assert off[worst] < 1e-6, f"final weights differ, {worst} the most by {off[worst]:.1e}"
    return f"3 steps: losses differ by {loss:.0e}, weights by at most {off[worst]:.0e} ({worst})"


def nano(device: torch.device) -> str:
    return _falls("nano", device, ProveConfig(batch=4, length=256, accumulation=1, documents=ProofDocuments.few))


def small(device: torch.device) -> str:
    if device.type != "cuda":
        raise Skipped("a billion parameters are for a GPU")
    return _falls("small", device, ProveConfig(batch=4, length=2048, accumulation=1, documents=ProofDocuments.few))


def _falls(name: str, device: torch.device, data: ProveConfig, count: int = 6) -> str:
    results, _ = trained(k3.preset(name), device, torch.bfloat16, count, data)
    losses = [r.losses[0] for r in results]
    assert all(math.isfinite(x) for x in losses) and not any(r.report.reason for r in results), f"losses {losses}"
    assert losses[-1] < losses[0] - 0.02, f"the loss of one batch does not fall: {[round(x, 3) for x in losses]}"
    tail = sorted(r.seconds for r in results[2:])[len(results[2:]) // 2]
    held = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at the peak" if device.type == "cuda" else ""
    return f"loss {losses[0]:.3f} to {losses[-1]:.3f} in {count} steps, {results[0].tokens / tail:,.0f} tokens/s{held}"


def gridded() -> K3Config:
    """nano with widths that every low precision takes."""
    mla = MLAConfig(heads=2, q_lora_rank=64, kv_lora_rank=64, nope_dim=32, rope_dim=32, v_dim=64)
    model = k3.preset("nano")
    model.mla = mla
    return model


def te(device: torch.device) -> str:
    if device.type != "cuda":
        raise Skipped("Transformer Engine needs a GPU")
    reasons = {kind: unfit(kind, *found(kind)) for kind in LowPrecision}
    kind = next((kind for kind, reason in reasons.items() if reason is None), None)
    if kind is None:
        raise Skipped("; ".join(f"{kind.value} {reason}" for kind, reason in reasons.items()))
    data = ProveConfig(batch=4, length=256, accumulation=1, documents=ProofDocuments.few, padding=False)
    (plain, _), (low, model) = (trained(gridded(), device, torch.bfloat16, 6, data, low=k) for k in (None, kind))
    ours, wanted = ([r.losses[0] for r in side] for side in (low, plain))
    first = abs(ours[0] - wanted[0]) / wanted[0]
    assert ours[0] != wanted[0], "the first loss is bf16's to the last bit: nothing was quantised"
    assert first < 0.01, f"the first loss is {ours[0]:.4f}, in bf16 {wanted[0]:.4f}"
    assert ours[-1] < ours[0] - 0.02 and all(map(math.isfinite, ours)), f"the loss of one batch does not fall: {ours}"
    layer = k3.construct.unwrap(model).get_submodule(name := "layers.1.attention.q_proj")
    weight = k3.construct.unwrap(model).get_parameter(f"{name}.weight")
    x = torch.randn(256, weight.shape[1], device=device, dtype=torch.bfloat16)
    off = distance(layer(x), x.double() @ weight.double().T)
    assert 1e-3 < off < 0.08, f"a product in {kind.value} is off by {off:.1e}; E4M3 rounds by up to 6 %"
    why = "; ".join(f"{k.value}: {reason}" for k, reason in reasons.items() if reason)
    return (
        f"{kind.value}: first loss off by {first:.1e}, last {ours[-1]:.3f} (bf16 {wanted[-1]:.3f}), one product {off:.0e} [{why}]"
    )
