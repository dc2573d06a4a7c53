"""Whoever owns the matrices, three steps of a whole model are those of a single process: in float64, both distributions."""

from __future__ import annotations

from itertools import product

import pytest

from parallel.local import Helper
from tests.equivalence.proofs import prove

SMALL = "model.layers=5 model.residual_block=2 prove.length=32 prove.batch=4 prove.steps=3 parallel.bucket=20000"
LAYOUTS = {
    "TP2": "parallel.tp=2",
    "TP4": "parallel.tp=4",
    "DP2": "parallel.dp=2",
    "DP4": "parallel.dp=4",
    "EP2": "parallel.ep=2",
    "PP2 VPP2": "parallel.pp=2 parallel.vpp=2 parallel.dp=2 prove.accumulation=2",
    "TP2 DP2 PP2": "parallel.tp=2 parallel.dp=2 parallel.pp=2 prove.accumulation=2",
}
CASES = list(product(LAYOUTS, ("owners", "gather")))
FAST = {("DP2", "owners")}


@pytest.mark.parametrize("layout, form", [pytest.param(*c, marks=[pytest.mark.slow] * (c not in FAST)) for c in CASES])
def test_three_steps_are_those_of_a_single_process(layout: str, form: str, helper: Helper) -> None:
    report = prove(f"{SMALL} {LAYOUTS[layout]} optim.muon.distribution={form}", helper)
    assert report.passed, list(report.failures())
