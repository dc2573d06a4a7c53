"""`k3 estimate` with a GPU: its words, its figures, its search; and its memory against the live tensors of whole runs."""

from __future__ import annotations

import pytest
import torch

from parallel.config import world_size
from parallel.local import Helper
from recipes import cli
from recipes.communication import communication
from recipes.compose import compose
from recipes.gpus import SPECS, Gpu
from recipes.memory import account
from recipes.search import search
from recipes.speed import Fabric, speed
from tests.recipes.memory_ranks import batches

LARGE = ["recipe=k3", "data.batch_size=1024", "parallel.dp=64"]


@pytest.mark.parametrize("model", ["tiny", "nano"])
def test_memory_is_that_of_live_tensors(model: str, helper: Helper):
    cfg = compose([f"model={model}", "data.batch_size=4", "data.seq_length=256"], job="estimate")
    (rank,) = account(cfg, documents=1)
    state = helper.run_ranks("tests.recipes.memory_ranks:state", 1, cfg, torch.float32)[0]
    saved = helper.run_ranks("tests.recipes.memory_ranks:pipeline", 1, cfg, torch.float32, batches(cfg, 1, 4))[0]["peak"]
    said = rank.memory.weights + rank.memory.gradients + rank.memory.optimizer + rank.stages[0].per_micro_batch
    assert said == pytest.approx(state["weights"] + state["gradients"] + state["optimizer"] + saved, rel=0.05)


def test_groups_are_as_fast_as_what_joins_them():
    spec = SPECS[Gpu.h100]
    cfg = compose([*LARGE, "gpu=h100"], job="estimate")
    fabric = Fabric(cfg.parallel, spec, cfg.estimate)
    assert fabric.seconds("tensor", 1e9) == 0  # one rank
    near = Fabric(compose(["model=k3", "parallel.ep=8"], job="estimate").parallel, spec, cfg.estimate)
    assert near.seconds("expert", 1e9, 0) == pytest.approx(1e9 / spec.link / cfg.estimate.bandwidth)
    assert fabric.seconds("expert", 1e9, 0) == pytest.approx(1e9 * (56 / 63) / spec.network / cfg.estimate.bandwidth)


def test_speed_is_consistent_and_moves_with_what_it_is_made_of():
    cfg = compose(LARGE, job="estimate")
    base = speed(cfg, Gpu.gb200)
    gpus, tokens = world_size(cfg.parallel), cfg.data.batch_size * cfg.data.seq_length
    assert base.tokens == pytest.approx(tokens / base.step / gpus)
    assert base.step == pytest.approx(base.pipeline + base.gradients + base.update + base.weights)
    assert base.mfu == pytest.approx(base.tokens * 646.72e9 / 2.5e15, rel=1e-4)
    for word, faster in (
        ("estimate.matmul=0.9", True), ("activations=selective", True), ("parallel.vpp=1", False),
        ("estimate.imbalance=2.0", False), ("estimate.hidden=0.9", True), ("optim.muon.precision=full", False),
        ("gpu=h100", False),
    ):  # fmt: skip
        other = compose([*LARGE, word], job="estimate")
        assert other.gpu is not None
        assert (speed(other, other.gpu).tokens > base.tokens) is faster, word
    assert communication(cfg)[0].sent["expert"] > 0


def test_the_search_finds_what_fits(capsys: pytest.CaptureFixture[str]):
    words = ["model=small", "precision=bf16", "data.seq_length=2048", "data.batch_size=64", "search=true", "gpus=8", "gpu=a100"]
    cfg = compose(words, job="estimate")
    best, compared = search(cfg, words)
    assert len(best) > 2 and compared > 100
    assert all(one.worst.memory.total <= 0.9 * 80e9 and world_size(one.cfg.parallel) == 8 for one in best)
    rates = [one.speed.tokens for one in best]
    assert rates == sorted(rates, reverse=True)
    assert cli.main(["estimate", *words]) == 0
    command = capsys.readouterr().out.splitlines()[-1].split()
    assert command[:2] == ["k3", "pretrain"]
    again = compose(command[2:], job="estimate")  # the words compose, and mean the layout that was timed
    assert again.parallel == best[0].cfg.parallel and again.activations == best[0].cfg.activations


def test_gpus_leaves_the_data_ranks_what_is_left():
    assert (
        compose(["model=k3", "parallel.pp=4", "parallel.ep=8", "gpus=64", "data.batch_size=64"], job="estimate").parallel.dp == 16
    )


def test_the_report_and_the_fit_are_printed(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["estimate", "recipe=k3"]) == 0
    out = capsys.readouterr().out
    for text in ("parameters: 2,779,484,476,000", "meets 104,189,612,640", "646.72 GFLOP", "ranks wait", "fits gb200", "MFU"):
        assert text in out
    assert cli.main(["estimate", "recipe=k3", "gpu=a100"]) == 0
    assert "DOES NOT FIT a100" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["gpu=gb20"], "gb20"),
        (["search=true"], "search=true: needs gpu"),
        (["search=true", "gpu=h100"], "search=true: needs gpus"),
        (["search=true", "gpu=h100", "gpus=8", "parallel.tp=2"], "parallel.tp: is what search=true chooses"),
        (["search=true", "gpu=h100", "gpus=8", "parallel=mixed"], "parallel: is what search=true chooses"),
        (["gpus=6", "parallel.tp=4"], "gpus=6: must be a multiple of tp * pp * cp"),
        (["gpus=8", "parallel.tp=2", "parallel.dp=2"], "gpus=8: the layout takes 4"),
        (["gpus=0"], "gpus=0: must be at least 1"),
        (["estimate.matmul=0.7"], "estimate.matmul: is read for a GPU alone"),
        (["gpu=h100", "estimate.matmul=1.7"], "estimate.matmul=1.7: must lie in (0, 1]"),
        (["gpu=h100", "precision=fp64"], "gpu=h100: is timed in bf16 and fp32"),
    ],
)
def test_contradictions_are_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["estimate", *words]) == 2
    assert says in capsys.readouterr().err
