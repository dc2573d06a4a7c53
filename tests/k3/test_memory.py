"""What k3/memory.py says a stage saves, against what autograd holds after its forward pass: to the byte, on a CPU."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch

import k3
import parallel
from k3 import memory
from k3.activations import ActivationConfig, Save, full, selective
from k3.config import Activation, Attention, Balance, K3Config, OutputGate, Residual
from k3.feed_forward import LatentMoE
from k3.presets import preset
from kernels.attention import blocks
from kernels.kda import chunked, tiles
from parallel.config import ParallelConfig
from parallel.local import Helper
from tests.k3.held import stages_held

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64


def batch(config: K3Config, rows: int, length: int, documents: int) -> dict[str, Any]:
    tokens = torch.randint(0, config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
    starts = torch.zeros(rows, length, dtype=torch.bool)
    starts[:, [i * length // documents for i in range(documents)]] = True
    mask = torch.ones(1 + config.mtp_layers, rows, length, dtype=torch.bool)
    return {"tokens": tokens, "document_starts": starts, "labels": tokens.roll(-1, 1), "loss_mask": mask}


def short(name: str, **changes: Any) -> K3Config:
    """A preset of fewer layers, with dials like `kda__heads=2` changed."""
    config = replace(copy.deepcopy(preset(name)), layers=5, residual_block=2)
    for dial, value in changes.items():
        owner, _, key = dial.rpartition("__")
        setattr(getattr(config, owner) if owner else config, key, value)
    return config.validate()


CASES: dict[str, tuple[K3Config, torch.dtype, int, int, int, list[int], int]] = {
    "tiny": (short("tiny"), FP32, 2, 48, 1, [5], 1),
    "tiny bf16, documents": (short("tiny"), BF16, 2, 48, 3, [5], 1),
    "float64": (short("tiny"), FP64, 1, 32, 2, [5], 1),
    "two stages": (short("tiny"), FP32, 2, 64, 2, [3, 2], 2),
    "empty ends": (short("tiny"), BF16, 1, 48, 1, [0, 5, 0], 3),
    "virtual stages": (short("tiny", mtp_layers=2), BF16, 2, 80, 2, [1, 1, 2, 1], 2),
    "nano, a chunk and a part": (short("nano"), FP32, 1, 100, 2, [5], 1),
    "nano, long rows": (short("nano", mtp_layers=0), BF16, 1, 256, 1, [2, 3], 2),
    "width": (short("tiny", hidden_size=96, dense_size=72, vocab_size=160), FP32, 3, 16, 1, [5], 1),
    "heads": (short("tiny", kda__heads=3, kda__head_dim=24, mla__heads=5, mla__v_dim=24), BF16, 1, 48, 2, [5], 1),
    "taps": (short("tiny", kda__conv_size=3, mla__q_lora_rank=None, mla__rope_dim=4), FP32, 1, 48, 2, [5], 1),
    "latents": (short("tiny", moe__latent_size=48, moe__expert_size=16, moe__top_k=5), BF16, 2, 32, 1, [5], 1),
    "experts": (short("tiny", moe__experts=24, moe__shared_experts=0), FP32, 2, 32, 1, [5], 1),
    "no latents": (short("tiny", latent=False, latent_norm=False, moe__renormalise=False), BF16, 1, 32, 1, [5], 1),
    "neither, float32": (short("tiny", latent=False, moe__shared_experts=0, moe__scaling=2.0), FP32, 1, 32, 1, [5], 1),
    "gates": (short("tiny", kda__output_gate=OutputGate.low_rank, mla__output_gate=False), FP32, 2, 32, 1, [5], 1),
    "no gates": (short("tiny", kda__output_gate=OutputGate.none, mla__output_gate=False), BF16, 2, 32, 1, [5], 1),
    "plain": (short("tiny", residual=Residual.sum, activation=Activation.swiglu), FP32, 2, 32, 1, [2, 3], 2),
    "aux": (short("tiny", moe__balance=Balance.aux, attention=Attention.mla), FP32, 1, 32, 2, [5], 1),
    "dense": (preset("dense"), BF16, 1, 32, 1, [2, 2], 2),
}


@pytest.mark.parametrize("case", CASES)
def test_saved_bytes_are_those_that_autograd_holds(case: str):
    config, dtype, rows, length, documents, sizes, pp = CASES[case]
    layers = [range(first, last) for first, last in pairwise(accumulate(sizes, initial=0))]
    measured = stages_held(config, parallel.start(), dtype, layers, pp, batch(config, rows, length, documents))
    share = memory.Share(rows, length, dtype.itemsize, ParallelConfig(pp=pp), documents)
    for number, found in enumerate(measured):
        said = memory.saved(memory.stage(config, share, layers, number))
        # an auxiliary loss keeps a few scalars, which are not counted
        slack = 1e-3 * found if config.moe.balance is Balance.aux else 0
        assert abs(said - found) <= slack, f"stage {number}: {said - found:+d} bytes"


@pytest.mark.parametrize(
    ("axes", "slack"), [({"tp": 2}, 0), ({"tp": 2, "sp": False}, 0), ({"cp": 2}, 0.002), ({"ep": 2, "dp": 2}, 0)]
)
def test_saved_bytes_of_a_rank(axes: dict[str, Any], slack: float, helper: Helper):
    config, layout = short("tiny"), ParallelConfig(**axes)
    target = "tests.recipes.memory_ranks:layout_held"
    found = helper.run_ranks(target, 2, config, layout, BF16, batch(config, 2, 64, 3))
    said = memory.saved(memory.stage(config, memory.Share(2, 64, 2, layout, 3), [range(config.layers)], 0))
    # the last context rank has more keys; its documents are those of the rows, cut. Routing is even over both expert ranks alone
    measured = found[-1] if layout.cp > 1 else sum(found) / 2
    assert said == pytest.approx(measured, rel=slack, abs=0), f"{said - measured:+} bytes"


def test_constants_are_those_of_the_kernels():
    assert (memory.CHUNK, memory.TILE, memory.ATTENTION_BLOCK) == (chunked.CHUNK, tiles.TILE, blocks.CPU_BLOCK)


POLICIES = {
    "attention": ActivationConfig(attention=Save.recompute),
    "feed_forward": ActivationConfig(feed_forward=Save.recompute),
    "head": ActivationConfig(head=Save.recompute),
    "layer": ActivationConfig(layer=Save.recompute),
    "selective": selective(),
    "full": full(),
    "pieces": ActivationConfig(head_chunk=16),
}


@pytest.mark.parametrize("case", ["virtual stages", "nano, a chunk and a part", "plain"])
@pytest.mark.parametrize("policy", POLICIES)
def test_saved_bytes_under_a_policy(policy: str, case: str):
    config, dtype, rows, length, documents, sizes, pp = CASES[case]
    layers = [range(first, last) for first, last in pairwise(accumulate(sizes, initial=0))]
    given = batch(config, rows, length, documents)
    measured = stages_held(config, parallel.start(), dtype, layers, pp, given, POLICIES[policy])
    share = memory.Share(rows, length, dtype.itemsize, ParallelConfig(pp=pp), documents)
    for number, found in enumerate(measured):
        said = memory.saved(memory.stage(config, share, layers, number), POLICIES[policy])
        assert said == found, f"stage {number}: {said - found:+d} bytes"


@pytest.mark.parametrize("balance", [Balance.quantile, Balance.bias])
def test_standing_bytes_are_buffers_and_what_dispatchers_hold(balance: Balance):
    config = short("tiny", moe__balance=balance, moe__ema=0.5 if balance is Balance.quantile else 0.0)
    model = k3.build(config, parallel.start(), dtype=BF16)
    model(**batch(config, 2, 32, 1))
    found = sum(b.nbytes for b in model.buffers())
    for part in model.modules():
        if isinstance(part, LatentMoE):
            held = part.dispatch._dispatcher
            found += held.probs.nbytes + held.routing_map.nbytes
    share, layers = memory.Share(2, 32, 2, ParallelConfig()), range(config.layers)
    said = memory.standing(config, share, layers, last=True) + memory.balancing(config, share, layers, last=True)
    assert said == found
