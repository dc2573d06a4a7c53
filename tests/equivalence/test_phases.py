"""`k3 prove phase=extend|sft|rl|distill`, quantisation in the loop: every layout computes what a single process computes."""

from __future__ import annotations

import pytest

from parallel.local import Helper
from tests.equivalence.proofs import prove
from tests.equivalence.test_broken import prove_broken

PHASES = ("extend", "sft", "rl", "distill")
LAYOUTS = {
    "TP2": "parallel.tp=2",
    "PP2": "parallel.pp=2 prove.accumulation=2",
    "EP2": "parallel.ep=2 parallel.dp=2",
    "CP2": "parallel.cp=2",
    "DP2": "parallel.dp=2 prove.accumulation=2",
}
SMALL = "model.layers=5 model.residual_block=2 qat=mxfp4"


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("phase", PHASES)
def test_a_phase_in_a_layout_equals_the_single_process(phase: str, layout: str, helper: Helper) -> None:
    report = prove(f"phase={phase} {SMALL} {LAYOUTS[layout]}", helper)
    assert report.passed, list(report.failures())
    names = 7 if phase in ("rl", "distill") else 2
    assert len(report.losses) == 2 * names and len(report.gradients) > 90


POLICY = f"phase=rl {SMALL}"


def test_this_way_what_is_right_passes_too(helper: Helper) -> None:
    report = prove_broken("nothing", f"{POLICY} parallel.cp=2", helper)
    assert report.passed, list(report.failures())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("own_denominators", "parallel.dp=2"),
        ("advantages_of_the_first_stretch", "parallel.cp=2"),
        ("mismatch_summed", "parallel.dp=2"),
        ("mismatch_of_own_tokens", "parallel.cp=2 prove.seed=1"),
    ],
)
def test_a_broken_policy_loss_fails(how: str, words: str, helper: Helper) -> None:
    report = prove_broken(how, f"{POLICY} {words}", helper)
    assert not report.passed
    wrong = [d.name for d in report.losses if not d.agrees]
    assert wrong, "the numbers that a step reports differ"
    if how.startswith("mismatch"):
        assert all(d.agrees for d in report.gradients), "it is reported, and no part of the loss"
    else:
        assert not all(d.agrees for d in report.gradients)
