"""Every pipeline computes what a single process computes, alone and with every other axis: as test_layouts.py, in float64."""

from __future__ import annotations

from itertools import product

import pytest

from parallel.local import Helper
from tests.equivalence.proofs import config, prove

# `tiny` has nine layers in blocks of four: most stages begin or end inside a block
PIPELINES = {
    "PP2": "parallel.pp=2 prove.accumulation=4",
    "PP3 uneven": "parallel.pp=3 parallel.split=[4,1,4] prove.accumulation=4",
    "PP4": "parallel.pp=4 prove.accumulation=4",
    "PP2 VPP2": "parallel.pp=2 parallel.vpp=2 prove.accumulation=4",
    "PP2 VPP3": "parallel.pp=2 parallel.vpp=3 prove.accumulation=4",
    "PP4 VPP2": "parallel.pp=4 parallel.vpp=2 prove.accumulation=4",
}
AXES = {"TP2": "parallel.tp=2", "EP2": "parallel.ep=2", "CP2": "parallel.cp=2", "DP2": "parallel.dp=2"}
FAST = {"PP3 uneven", "PP2 VPP2", "PP4 VPP2", "PP2 VPP2 with DP2", "PP2 VPP2 with EP2"}  # the others are marked slow
WITH_AXES = {f"{p} with {a}": f"{PIPELINES[p]} {AXES[a]}" for p, a in product(PIPELINES, AXES)}

SHORT = "model.layers=5 model.residual_block=2 prove.length=32"
VARIANTS = {
    "shorter than the pipeline": f"{SHORT} parallel.pp=4 prove.accumulation=2",
    "one micro-batch": f"{SHORT} parallel.pp=3 prove.accumulation=1",
    "longer, in uneven groups": f"{SHORT} parallel.pp=2 parallel.vpp=2 prove.accumulation=7 parallel.group=5",
    "odd ranks, overlapped warm-up": f"{SHORT} model.layers=6 parallel.pp=3 parallel.vpp=2 parallel.overlap_warmup=true "
    "prove.accumulation=5",
    "overlapped warm-up": f"{SHORT} parallel.pp=2 parallel.vpp=2 parallel.overlap_warmup=true prove.accumulation=4",
    "embedding and head alone": f"{SHORT} parallel.pp=2 parallel.vpp=2 parallel.split=[0,3,2,0] prove.accumulation=3",
    "a block a stage": f"{SHORT} parallel.pp=2 parallel.vpp=2 model.layers=8 prove.accumulation=2",
    "many documents": f"{SHORT} parallel.pp=2 parallel.vpp=2 parallel.cp=2 prove.documents=many prove.accumulation=2",
    "no packing": f"{SHORT} parallel.pp=2 parallel.cp=2 prove.documents=none prove.padding=false prove.accumulation=3",
    "in many buckets": f"{SHORT} parallel.pp=2 parallel.vpp=2 parallel.dp=2 parallel.bucket=20000 prove.accumulation=3",
    "without ZeRO": f"{SHORT} parallel.pp=2 parallel.vpp=2 parallel.dp=2 parallel.zero=0 prove.accumulation=3",
    "without overlap": f"{SHORT} parallel.pp=2 parallel.vpp=2 parallel.dp=2 parallel.overlap=false prove.accumulation=3",
    "plain residual": "model.layers=5 prove.length=32 parallel.pp=2 parallel.vpp=2 model.residual=sum prove.accumulation=2",
    "no MTP": f"{SHORT} parallel.pp=2 parallel.vpp=2 model.mtp_layers=0 prove.accumulation=2",
    "two MTP layers": f"{SHORT} parallel.pp=2 model.mtp_layers=2 prove.accumulation=2",
    "auxiliary loss": f"{SHORT} parallel.pp=2 parallel.ep=2 model.moe.balance=aux prove.accumulation=2",
    "ZeRO-2": f"{SHORT} parallel.pp=2 parallel.vpp=2 parallel.dp=2 parallel.zero=2 prove.accumulation=3",
    "ZeRO-2, offloaded": f"{SHORT} model.layers=6 parallel.pp=2 parallel.vpp=3 parallel.dp=2 parallel.ep=2 parallel.tp=2 "
    "parallel.zero=2 parallel.offload_gradients=true activations=full prove.accumulation=5",
    "AdamW": f"{SHORT} parallel.pp=2 parallel.vpp=2 parallel.dp=2 optim=adamw prove.accumulation=2",
    "clipped heads": "parallel.pp=2 parallel.tp=2 optim.clip.tau=0.02 prove.length=32 prove.accumulation=2",
}
VARIANTS |= {
    f"recomputed: {how}": f"{SHORT} parallel.pp=2 parallel.vpp=2 {also} activations={how} prove.accumulation=3"
    for how, also in (("full", "parallel.tp=2"), ("selective", "parallel.dp=2 parallel.ep=2"))
}
QUICK = {"recomputed: full", "ZeRO-2", "shorter than the pipeline", "longer, in uneven groups"}


def _agrees(words: str, helper: Helper) -> None:
    report = prove(words, helper)
    assert report.passed, list(report.failures())
    assert all(d.tolerance == 1e-10 for d in report.gradients)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in PIPELINES])
def test_pipeline_equals_the_single_process(name: str, helper: Helper) -> None:
    _agrees(PIPELINES[name], helper)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in WITH_AXES])
def test_pipeline_with_another_axis(name: str, helper: Helper) -> None:
    _agrees(f"{WITH_AXES[name]} prove.accumulation=4", helper)


def test_three_axes_on_eight_processes(helper: Helper) -> None:
    words = "parallel.tp=2 parallel.pp=2 parallel.cp=2 prove.accumulation=2"
    assert config(words).parallel.dp == 1
    _agrees(words, helper)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in VARIANTS])
def test_variant(name: str, helper: Helper) -> None:
    _agrees(VARIANTS[name], helper)


@pytest.mark.parametrize("vpp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_zero_2_holds_two_chunk_buffers_and_the_shard(vpp: int, helper: Helper) -> None:
    """Gradients as tensor bytes, throughout a step of the whole model: at most that, and exactly that."""
    words = f"model.layers=8 parallel.pp=2 parallel.vpp={vpp} parallel.dp=2 prove.accumulation=4 prove.length=32 parallel.zero="
    one, two = (helper.run_ranks("tests.equivalence.ranks:gradient_bytes", 4, config(f"{words}{zero}")) for zero in (1, 2))
    for (seen_one, stages), (seen_two, _) in zip(one, two):
        assert len(seen_one) == len(seen_two) == 4 * vpp + 1
        assert set(seen_one) == {sum(stages)}
        assert set(seen_two) == {2 * max(stages) + sum(stages) // 2}
