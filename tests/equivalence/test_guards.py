"""A loss that spikes on one rank skips the step on all, and the run goes on as if that batch's update had never been."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import parallel
from parallel.local import Helper
from recipes.compose import compose
from recipes.config import Config
from tests.equivalence.guard_ranks import DIALS, SPIKE, STEPS, train

TINY = ["model=tiny", "prove.batch=4", "prove.length=32", f"prove.steps={STEPS}", *DIALS]
LAYOUTS = {
    "dp=2": (["parallel.dp=2"], 1),
    "dp=2 bfloat16": (["parallel.dp=2", "prove.dtype=bfloat16"], 1),
    "dp=2 pp=2 vpp=2": (["parallel.dp=2", "parallel.pp=2", "parallel.vpp=2"], 3),  # the last rank has the last stage
    # what tensor ranks report of one loss differs here, as rounding may make it: they still decide alike
    "tp=2 dp=2, the loss alone": (["parallel.tp=2", "parallel.dp=2"], 3),
}


def _config(words: list[str]) -> Config:
    return compose([*TINY, *words], job="prove")


def _check(spiked: list[dict[str, Any]], spared: list[dict[str, Any]], what: str = "gradient norm") -> None:
    for rank, (run, other) in enumerate(zip(spiked, spared, strict=True)):
        reasons = run["reasons"]
        assert reasons[SPIKE] and reasons[SPIKE].startswith(f"spike of the {what}, "), rank
        assert " times the median of the last 5 (limit " in reasons[SPIKE]
        assert [i for i, reason in enumerate(reasons) if reason] == [SPIKE], reasons
        assert len({ranks["reasons"][SPIKE] for ranks in spiked}) == 1, "one decision for all"
        assert other["reasons"] == [None] * (STEPS - 1) and run["position"] == other["position"] == STEPS, "data advances"
        before, after = run["states"][SPIKE - 1], run["states"][SPIKE]
        assert {n for n in before if not torch.equal(before[n], after[n])} == {"step", "skipped"}, "nothing moves but counters"
        for step in range(STEPS):
            if step != SPIKE:
                want = other["states"][step - (step > SPIKE)]
                differing = {n for n, t in run["states"][step].items() if not torch.equal(t, want[n])}
                assert differing == ({"skipped"} if step > SPIKE else set()), (rank, step, sorted(differing)[:5])
    last, first = spiked[0]["states"][-1], spiked[0]["states"][SPIKE]
    moved = {n for n in last if not torch.equal(last[n], first[n])}
    assert {n.rsplit(".", 1)[-1] for n in moved} >= {"momentum", "exp_avg", "weight", "bias", "losses"}, (
        "else this would show nothing"
    )


def test_in_one_process() -> None:
    cfg = _config(["parallel.dp=1"])
    try:
        _check([train(cfg, spiking=0)], [train(cfg, spiking=None)])
    finally:
        parallel.stop()


def _ranks(layout: str, helper: Helper) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    words, spiking = LAYOUTS[layout]
    cfg = _config(words)
    p = cfg.parallel
    size = p.tp * p.pp * p.cp * (p.dp or 1)
    return tuple(  # type: ignore[return-value]
        helper.run_ranks("tests.equivalence.guard_ranks:train", size, cfg, who, "alone" not in layout, timeout=300)
        for who in (spiking, None)
    )


@pytest.mark.parametrize("layout", [pytest.param(name, marks=pytest.mark.slow if name != "dp=2" else ()) for name in LAYOUTS])
def test_on_ranks(helper: Helper, layout: str) -> None:
    spiked, spared = _ranks(layout, helper)
    _check(spiked, spared, "loss" if "alone" in layout else "gradient norm")
    for rank in spiked:
        twin = next(other for other in spiked if other["place"] == rank["place"])
        for step in range(STEPS):
            assert all(torch.equal(w, twin["weights"][step][n]) for n, w in rank["weights"][step].items()), step
            for name in ("guard.losses", "guard.norms"):
                assert torch.equal(rank["states"][step][name], spiked[0]["states"][step][name]), "all decide from the same"
