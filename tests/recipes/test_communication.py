"""The bytes that `k3 estimate` says against those that real steps on gloo hand over."""

from __future__ import annotations

import pytest

from parallel.config import world_size
from parallel.local import Helper
from recipes.communication import communication
from recipes.compose import compose

SMALL = [
    "model=tiny", "model.layers=5", "model.residual_block=2", "precision=fp32", "data.seq_length=64", "data.batch_size=8",
    "data.micro_batch_size=1",
]  # fmt: skip

LAYOUTS = [
    ["parallel.cp=2"],
    ["parallel.dp=2", "parallel.ep=2"],
    *(
        pytest.param(words, marks=pytest.mark.slow)
        for words in (
            ["parallel.tp=2"],
            ["parallel.tp=2", "parallel.sp=false"],
            ["parallel.dp=2", "parallel.zero=0"],
            ["parallel.pp=2", "parallel.vpp=2", "parallel.split=[0,2,2,1]"],
            ["parallel.tp=2", "activations=full"],
            ["parallel.tp=2", "parallel.ep=2", "activations=selective"],
            ["parallel.tp=2", "parallel.cp=2", "parallel.ep=4", "parallel.pp=2", "parallel.vpp=2"],
            ["parallel.pp=2", "parallel.vpp=2", "parallel.dp=2", "parallel.zero=2"],
        )
    ),
]


@pytest.mark.parametrize("words", LAYOUTS, ids=" ".join)
def test_bytes_are_those_of_a_real_step(words: list[str], helper: Helper):
    cfg = compose([*SMALL, *words], job="estimate")
    layout, size = cfg.parallel, world_size(cfg.parallel)
    real = helper.run_ranks("tests.recipes.communication_ranks:step", size, cfg)[0]
    ranks = communication(cfg)
    said = {axis: sum(rank.sent.get(axis, 0) for rank in ranks) * size // layout.pp for rank in ranks for axis in rank.sent}
    there = {axis: sum(real.get(axis, {}).values()) for axis in ("tensor", "context", "pipeline", "expert")}
    for axis in ("tensor", "context", "pipeline"):
        assert said.get(axis, 0) == pytest.approx(there[axis], rel=0.005, abs=512), axis  # without the shapes of payloads
    assert said.get("expert", 0) == pytest.approx(there["expert"], rel=0.12)  # routing is not balanced at the first step
    of_gradients = sum(sum(real.get(axis, {}).values()) for axis in ("data", "expert-data"))
    assert said.get("gradients", 0) == pytest.approx(of_gradients, rel=0.02)  # buckets are padded
    update = real.get("update data", {}), real.get("update expert-data", {})
    assert said.get("weights", 0) == pytest.approx(sum(u.get("all-gather", 0) for u in update), rel=0.02, abs=512)
    assert sum(u.get("all-to-all", 0) for u in update) <= said.get("muon owners", 0)
    counts = real.get("update all", {}).get("all-reduce", 0)
    assert said.get("balancing", 0) <= counts <= said.get("balancing", 0) + 4096 or size == layout.pp
