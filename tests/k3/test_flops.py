"""Operations from shapes against torch's own counter on real models, and against the report's numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import k3
from k3 import flops
from k3.activations import OPTIONS
from k3.config import Gate, K3Config, OutputGate
from k3.memory import ATTENTION_BLOCK, Share
from parallel.config import ParallelConfig

aten = torch.ops.aten


def _batched(into: Any, a: Any, b: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * a[0] * a[1] * a[2] * b[2]


def _grouped(a: Any, b: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * a[0] * a[1] * b[-1]  # [N, in] [E, in, out], or [out, N] [N, in] for the weights' gradients


# products that torch's counter does not know
MORE = {aten.baddbmm_: _batched, aten._grouped_mm: _grouped}
B, T = 2, 512


def counted(c: K3Config, activations: str = "keep") -> tuple[int, int, int, int]:
    """Operations of forward and backward as the counter sees them, and of these the grouped ones of the experts."""
    model = k3.build(c, activations=OPTIONS[activations]()).train()
    tokens = torch.randint(0, c.vocab_size, (B, T + 1), generator=torch.Generator().manual_seed(0))
    counts = []
    with FlopCounterMode(display=False, custom_mapping=MORE) as ahead:
        loss = model(tokens[:, :-1].contiguous(), labels=tokens[:, 1:].contiguous()).sum()
    with FlopCounterMode(display=False, custom_mapping=MORE) as back:
        loss.backward()
    for counter in (ahead, back):
        counts.append(counter.get_total_flops())
    grouped = [counter.get_flop_counts()["Global"].get(aten._grouped_mm, 0) for counter in (ahead, back)]
    return counts[0], counts[1], grouped[0], grouped[1]


def said(c: K3Config) -> list[flops.Work]:
    share = Share(B, T, 4, ParallelConfig(), documents=1)
    work = flops.stage(c, share, [range(c.layers)], 0, block=ATTENTION_BLOCK)
    return [w for w in work if w.kind != "mixing"]  # matrix-vector and elementwise: the counter does not see it


def linear_like(c: K3Config) -> K3Config:
    kda = dataclasses.replace(c.kda, gate=Gate.softplus, output_gate=OutputGate.low_rank)
    return dataclasses.replace(c, kda=kda, mla=dataclasses.replace(c.mla, q_lora_rank=None, output_gate=False), latent=False)


@pytest.mark.parametrize("variant", ["k3", "linear"])
def test_operations_are_those_of_the_real_model(variant: str):
    c = dataclasses.replace(k3.preset("tiny"), layers=5)
    c = linear_like(c) if variant == "linear" else c
    forward, backward, grouped, grouped_back = counted(c)
    work = said(c)
    experts = sum(w.forward for w in work if w.kind == "experts")
    assert sum(w.forward for w in work) - experts == forward - grouped
    assert sum(w.backward for w in work) - 2 * experts == pytest.approx(backward - grouped_back, rel=1e-6)
    # an expert with few tokens pads them to a minimum
    assert grouped == pytest.approx(experts, rel=0.02) and grouped_back == pytest.approx(2 * experts, rel=0.02)


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_recomputation_is_what_is_computed_twice(policy: str):
    c = dataclasses.replace(k3.preset("tiny"), layers=5)
    twice = counted(c, policy)[1] - counted(c)[1]
    expected = sum(w.forward for w in flops.again(said(c), OPTIONS[policy]()))
    assert 0.9 * expected <= twice <= 1.005 * expected, "it ends at the last saved tensor: a little less"


def test_the_report_is_reproduced():
    k = flops.parameters(k3.preset("k3"))
    assert round(k.total / 1e9, 2) == 2779.48 and round(k.active / 1e9, 1) == 104.2 and k.mtp == 0
    small = flops.parameters(k3.preset("linear_48b"))
    assert round(small.total / 1e9, 1) == 49.1
    with_mtp = flops.parameters(dataclasses.replace(k3.preset("k3"), mtp_layers=1))
    assert with_mtp.total == k.total and round(with_mtp.mtp / 1e9, 1) == 30.1


def test_a_token_costs_six_times_its_matrices_and_what_attention_adds():
    c = k3.preset("k3")
    by_kind = flops.per_token(c, 8192)
    products = sum(v for kind, v in by_kind.items() if kind not in ("kda", "attention", "mixing"))
    assert products == pytest.approx(6 * flops.parameters(c).active, rel=2e-3)  # all but norms, convolutions and biases
    layers = sum(c.is_mla(i) for i in range(c.layers))
    assert by_kind["attention"] == 3 * 2 * layers * 96 * (192 + 128) * (8192 + 1) / 2
    longer = flops.per_token(c, 65536)
    assert longer["kda"] == by_kind["kda"] and longer["attention"] > 7.9 * by_kind["attention"]


@pytest.mark.parametrize("layout", [ParallelConfig(tp=2, dp=1), ParallelConfig(cp=2, dp=1), ParallelConfig(ep=2, dp=2)])
def test_ranks_share_the_work(layout: ParallelConfig):
    c = k3.preset("tiny")
    whole = flops.stage(c, Share(2, 256, 4, ParallelConfig()), [range(c.layers)], 0)
    part = flops.stage(c, Share(2, 256, 4, layout), [range(c.layers)], 0)
    ranks = layout.tp * layout.cp
    for kind in ("experts", "shared", "router", "latent", "dense", "head"):
        of = [sum(w.forward for w in work if w.kind == kind) for work in (whole, part)]
        assert of[1] * ranks == of[0], kind
    scores = [sum(w.forward for w in work if w.kind == "attention") for work in (whole, part)]
    assert scores[1] * ranks >= scores[0] and (layout.cp == 1) == (scores[1] * ranks == scores[0])  # the last stretch sees most
