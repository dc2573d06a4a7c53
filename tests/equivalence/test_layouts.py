"""Every layout computes what a single process computes: losses, gradients, weights, routes and loads, in float64.

The model is the whole one at toy width: KDA, MLA, latent MoE, residuals, MTP, balancing, Muon, weight clip.
"""

from __future__ import annotations

import pytest
import torch

from parallel.local import Helper
from tests.equivalence.proofs import config, prove, prove_bfloat16, prove_float32, reference

LAYOUTS = {
    "TP2": "parallel.tp=2 parallel.sp=false",
    "TP2 SP": "parallel.tp=2",
    "TP4 SP": "parallel.tp=4",
    "EP2": "parallel.ep=2",
    "EP4": "parallel.ep=4",
    "TP2 EP2": "parallel.tp=2 parallel.ep=2",
    "TP2 EP2 without SP": "parallel.tp=2 parallel.ep=2 parallel.sp=false",
    "CP2": "parallel.cp=2 prove.documents=none",
    "CP4": "parallel.cp=4",
    "CP2, documents across the edge": "parallel.cp=2 prove.documents=crossing",
    "CP2, many documents in one shard": "parallel.cp=2 prove.documents=many",
    "DP2": "parallel.dp=2 prove.accumulation=2",
    "DP2 without ZeRO": "parallel.dp=2 parallel.zero=0 prove.accumulation=2",
    "DP2 without overlap": "parallel.dp=2 parallel.overlap=false prove.accumulation=2",
    "DP2 in many buckets": "parallel.dp=2 parallel.bucket=20000 prove.accumulation=2",
    "DP2 EP2": "parallel.dp=2 parallel.ep=2 prove.accumulation=2",
    "TP2 CP2": "parallel.tp=2 parallel.cp=2",
    "TP2 CP2 DP2 EP4": "parallel.tp=2 parallel.cp=2 parallel.dp=2 parallel.ep=4 prove.accumulation=2",
}


# other ways to the same sums, which tests/equivalence/test_optimizer.py holds on small matrices
VARIANTS = {"TP2 EP2 without SP", "DP2 without ZeRO", "DP2 without overlap", "DP2 in many buckets"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in VARIANTS)) for n in LAYOUTS])
def test_layout_equals_the_single_process(name: str, helper: Helper) -> None:
    report = prove(LAYOUTS[name], helper)
    assert report.passed, list(report.failures())
    assert len(report.gradients) > 150 and all(d.tolerance == 1e-10 for d in report.gradients)


# five layers: KDA, MLA, a dense and four MoE ones, two residual blocks, MTP
MIXED = "model.layers=5 parallel.tp=2 parallel.cp=2 parallel.ep=2"
SWITCHES = [
    "model.residual=sum",
    "model.attention=mla",
    "model.activation=swiglu",
    "model.latent=false",
    "model.latent_norm=false",
    "model.mtp_layers=0",
    "model.mtp_layers=2",
    "model.kda.gate=softplus model.kda.output_gate=low_rank",
    "model.kda.output_gate=none",
    "model.mla.output_gate=false model.mla.q_lora_rank=null",
    # Kimi Linear
    "model.kda.gate=softplus model.kda.output_gate=low_rank model.mla.output_gate=false model.mla.q_lora_rank=null "
    "model.residual=sum model.latent=false model.latent_norm=false model.activation=swiglu model.mtp_layers=0",
    "model.moe.balance=bias",
    "model.moe.balance=aux",
    "model.moe.balance=none",
    "model.moe.ema=0.5",
    "model.moe.shared_experts=0",
    "model.moe.renormalise=false",
    "optim.muon.per_head=false",
    "optim=adamw",
    "optim.clip.enabled=false",
    "optim.router.optimizer=muon",
]


# against a single process that recomputes nothing
SWITCHES += ["activations=full", "activations=selective", "activations.head_chunk=24"]


# one of each kind; the others are marked slow
QUICK = {
    "model.residual=sum", "model.latent=false", "model.mtp_layers=2", "model.kda.gate=softplus model.kda.output_gate=low_rank",
    "model.moe.balance=aux", "optim.muon.per_head=false", "activations=full",
    "activations.head_chunk=24",
}  # fmt: skip


@pytest.mark.parametrize("switch", [pytest.param(s, marks=[pytest.mark.slow] * (s not in QUICK)) for s in SWITCHES])
def test_every_switch_under_a_mixed_layout(switch: str, helper: Helper) -> None:
    report = prove(f"{MIXED} {switch}", helper)
    assert report.passed, list(report.failures())


def test_a_dense_model_under_a_mixed_layout(helper: Helper) -> None:
    report = prove("model.layers=5 parallel.tp=2 parallel.cp=2 model.moe.experts=0", helper)
    assert report.passed, list(report.failures())


def test_the_weight_clip_works_on_cut_weights(helper: Helper) -> None:
    """A small tau, so that heads are clipped: on every tensor rank its own, from the maximum over data and context ranks."""
    words = "model.layers=5 parallel.tp=2 parallel.dp=2 parallel.bucket=20000"
    report = prove(f"{words} optim.clip.tau=0.02", helper)
    assert report.passed, list(report.failures())
    clipped, free = (reference(config(f"{words} optim.clip.tau={tau}"), helper) for tau in (0.02, 100))
    for name in ("q_b_proj", "kv_b_proj"):
        weight = f"layers.3.attention.{name}.weight"
        assert not torch.equal(clipped.weights[weight], free.weights[weight]), "nothing was clipped"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["parallel.tp=2 parallel.dp=2", "parallel.cp=2 parallel.dp=2 parallel.ep=2"])
def test_twenty_adamw_steps_leave_every_replica_bitwise_equal(layout: str, helper: Helper) -> None:
    report = prove(f"{layout} optim=adamw prove.steps=20 prove.length=24 prove.dtype=float32 prove.documents=few", helper)
    assert report.drift == {}
    assert not report.skipped and len(report.grad_norms) == 20


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["parallel.tp=2", "parallel.dp=2"])
def test_bfloat16_stays_within_what_bfloat16_loses(layout: str, helper: Helper) -> None:
    report = prove_bfloat16(f"{layout} prove.steps=20 prove.length=32 prove.documents=few", helper)
    assert report.passed, list(report.failures())
    assert len(report.losses) == 40


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_in_float32(name: str, helper: Helper) -> None:
    """A gradient may miss the proof's 1e-5 only where the layout is no further from float64 than one float32 process is.

    Which sums do that depends on the CPU: a few parameters of the tiny model are worse conditioned than 1e-5.
    """
    report, layout_error, own_error = prove_float32(LAYOUTS[name], helper)
    missed = [d.name for d in report.gradients if not d.agrees]
    assert all(layout_error[name] <= own_error[name] for name in missed) and len(missed) <= 2
    others = [d for d in (*report.losses, *report.grad_norms, *report.outputs, *report.weights) if not d.agrees]
    assert not (others or report.drift or report.loads or report.skipped), list(report.failures())


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_many_steps_of_everything_together(optimizer: str, helper: Helper) -> None:
    """Five steps of the three axes on eight processes, accumulating, at twice the length."""
    words = f"{LAYOUTS['TP2 CP2 DP2 EP4']} optim={optimizer} prove.steps=5 prove.length=128 prove.accumulation=3"
    assert config(words).parallel.ep == 4
    report = prove(words, helper)
    assert report.passed, list(report.failures())
