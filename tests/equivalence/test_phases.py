"""`k3 prove phase=extend|sft|rl|distill`, quantisation in the loop: every layout computes what a single process computes."""

from __future__ import annotations

import pytest
import torch

from parallel.local import Helper
from tests.equivalence.proofs import config, prove, reference
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


@pytest.mark.parametrize("phase", ["rl", "distill"])
def test_mtp_layers_take_no_part(phase: str, helper: Helper) -> None:
    """Their gradients are zero, to the bit, and their routers count nothing: so no bias moves. That nothing waits for them, with
    overlap and ZeRO, the proofs above show.
    """
    trace = reference(config(f"phase={phase} {SMALL}"), helper)
    mtp = {name: gradient for name, gradient in trace.gradients.items() if name.startswith("mtp.")}
    assert len(mtp) > 20 and not any(gradient.any() for gradient in mtp.values())
    assert sum(bool(gradient.any()) for gradient in trace.gradients.values()) > 60
    assert trace.loads and not any(name.startswith("mtp.") for name in trace.loads)
    (bias,) = [name for name in trace.weights if name.startswith("mtp.") and name.endswith("balancer.bias")]
    more = reference(config(f"phase={phase} {SMALL} prove.steps=1"), helper)
    assert torch.equal(trace.weights[bias], more.weights[bias])


def test_this_way_what_is_right_passes_too(helper: Helper) -> None:
    report = prove_broken("nothing", f"{POLICY} parallel.cp=2", helper)
    assert report.passed, list(report.failures())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("own_denominators", "parallel.dp=2"),
        ("advantages_of_the_first_stretch", "parallel.cp=2"),
        ("times_of_the_first_stretch", "parallel.cp=2"),
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
