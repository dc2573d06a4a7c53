"""The weight clip in real models, measured at learning rate 0: heads above tau end at tau, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import parallel
from parallel.local import Helper
from recipes.compose import compose
from recipes.config import Config
from tests.equivalence.clip_ranks import QUERIES, TAU, step

TINY = ["model=tiny", "prove.batch=4", "prove.length=32", f"optim.clip.tau={TAU}", "optim.schedule.min_lr=0"]
LAYOUTS = {
    "tp=2": (["parallel.tp=2"], 2),
    "dp=2": (["parallel.dp=2"], 2),
    "pp=2": (["parallel.pp=2"], 2),
    "cp=2": (["parallel.cp=2"], 2),
    "dp=2 bfloat16": (["parallel.dp=2", "prove.dtype=bfloat16"], 2),
    "tp=2 dp=2 bfloat16": (["parallel.tp=2", "parallel.dp=2", "prove.dtype=bfloat16"], 4),
}
SLOW = {"pp=2", "cp=2", "dp=2 bfloat16", "tp=2 dp=2 bfloat16"}


def _config(words: list[str]) -> Config:
    return compose([*TINY, *words], job="prove")


def _check(ranks: list[dict[str, Any]]) -> float:
    """Returns the largest distance of a clipped head from tau, relative to it."""
    worst, clipped = 0.0, set()
    for rank in ranks:
        assert rank["lr"] == 0.0 and rank["agree"]
        before, after, touched = rank["before"], rank["after"], set()
        for layer, (nope, rope, value) in rank["heads"].items():
            query, key_value = f"{layer}.q_b_proj.weight", f"{layer}.kv_b_proj.weight"
            touched |= {query, key_value}
            for head, (first, second) in enumerate(zip(rank["first"][layer].tolist(), rank["second"][layer].tolist())):
                q, q_after = (w[query].unflatten(0, (-1, nope + rope))[head] for w in (before, after))
                kv, kv_after = (w[key_value].unflatten(0, (-1, nope + value))[head] for w in (before, after))
                whole = rank["tensor"] * len(rank["first"][layer]) + head
                assert (first > TAU) == (QUERIES[whole] > 1), (layer, whole, first)
                assert torch.equal(kv[nope:], kv_after[nope:]), "values"
                if first > TAU:
                    clipped.add((layer, whole))
                    worst = max(worst, abs(second / TAU - 1))
                    assert not torch.equal(q, q_after) and not torch.equal(kv[:nope], kv_after[:nope])
                else:
                    assert first > 0 or QUERIES[whole] == 0, "one head has no positive logit"
                    assert torch.equal(q, q_after) and torch.equal(kv, kv_after), (layer, whole)
                    assert second == first
        assert all(torch.equal(w, after[n]) for n, w in before.items() if n not in touched)
    assert {rank["clipped"] for rank in ranks} == {len(clipped)} and len(clipped) == 8, "two heads of three layers and the MTP's"
    largest = max(float(values.max()) for rank in ranks for values in rank["first"].values())
    assert {rank["max_logit"] for rank in ranks} == {largest}
    assert sum(rank["kda"] for rank in ranks) > 0, "a hybrid stack"
    print(f"clipped heads end within {worst:.2e} of tau")
    return worst


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_heads_above_tau_end_at_tau_and_the_others_stay(dtype: str) -> None:
    try:
        alone = step(_config(["parallel.dp=1", f"prove.dtype={dtype}"]))
    finally:
        parallel.stop()
    assert (alone["masters"] > 0) == (dtype == "bfloat16")
    assert _check([alone]) < (0.01 if dtype == "bfloat16" else 1e-5)


@pytest.mark.parametrize("layout", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in LAYOUTS])
def test_on_ranks(helper: Helper, layout: str) -> None:
    words, size = LAYOUTS[layout]
    assert _check(helper.run_ranks("tests.equivalence.clip_ranks:step", size, _config(words), timeout=300)) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken, layout",
    [("own tokens alone", "dp=2"), ("factors forgotten", "dp=2"), ("masters alone", "dp=2 bfloat16")],
)
def test_broken_code_is_noticed(helper: Helper, broken: str, layout: str) -> None:
    words, size = LAYOUTS[layout]
    ranks = helper.run_ranks("tests.equivalence.clip_ranks:step", size, _config(words), broken, timeout=300)
    with pytest.raises(AssertionError):
        assert _check(ranks) < 0.01
