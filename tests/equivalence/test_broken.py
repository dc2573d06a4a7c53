"""A proof of broken code fails, and names what is wrong."""

from __future__ import annotations

import pytest

from parallel.config import world_size
from parallel.local import Helper
from recipes.proof.compare import Report, compare
from recipes.proof.tolerances import exact
from recipes.proof.trace import merge
from tests.equivalence.proofs import config, reference


def prove_broken(how: str, words: str, helper: Helper) -> Report:
    cfg = config(words)
    one = reference(cfg, helper)
    ranks = helper.run_ranks("tests.equivalence.sabotage:broken", world_size(cfg.parallel), how, cfg)
    return compare(one, merge([t for t in ranks if t is not None]), exact(one))


def differing(report: Report) -> list[str]:
    return [d.name for d in report.gradients if not d.agrees]


@pytest.mark.parametrize("how", ["nothing", "recomputed"])
def test_what_is_right_passes_this_way_too(how: str, helper: Helper) -> None:
    report = prove_broken(how, "parallel.tp=2", helper)
    assert report.passed, list(report.failures())


def test_an_unreduced_norm_is_named(helper: Helper) -> None:
    report = prove_broken("norm_left_unreduced", "parallel.tp=2", helper)
    assert differing(report) == ["layers.3.input_layernorm.weight"]
    (message, *_) = report.failures()
    assert message.startswith("the first parameter whose gradient differs is layers.3.input_layernorm.weight (")
    assert "layers.3.input_layernorm.weight" in report.drift  # its copies go apart at the first step


def test_a_column_parallel_key_value_down_projection_fails(helper: Helper) -> None:
    report = prove_broken("key_value_down_column_parallel", "parallel.tp=2 parallel.sp=false", helper)
    assert "layers.3.attention.kv_a_proj_with_mqa.weight" in differing(report)
    assert all(d.agrees for d in report.outputs), "the forward pass does not show it"
    assert report.losses[0].agrees, "nor does the first loss"


@pytest.mark.parametrize("how, part", [("convolution_leaks", "layers.0"), ("kda_leaks", "layers.0"), ("mla_leaks", "layers.3")])
def test_a_leaking_document_boundary_is_found_in_its_layer(how: str, part: str, helper: Helper) -> None:
    report = prove_broken(how, "parallel.cp=2 prove.documents=crossing", helper)
    first = next(d.name for d in report.outputs if not d.agrees)
    assert first.startswith(f"{part}.attention"), first
    assert not report.passed and any("the forward pass first differs at" in line for line in report.failures())


def test_counts_doubled_by_recomputation_fail(helper: Helper) -> None:
    report = prove_broken("counted_twice_by_recomputation", "parallel.tp=2", helper)
    assert any("the layout counted" in line for line in report.loads)
    assert report.losses[0].agrees


def test_counted_padding_fails(helper: Helper) -> None:
    report = prove_broken("padding_counted", "parallel.dp=2 prove.padding=true", helper)
    assert any("the layout counted" in line for line in report.loads)


def test_gradients_divided_by_the_data_ranks_fail(helper: Helper) -> None:
    report = prove_broken("divided_by_data_ranks", "parallel.dp=2 optim=adamw", helper)
    assert not report.grad_norms[0].agrees and len(differing(report)) > 150


def test_a_replica_one_rounding_off_is_drift(helper: Helper) -> None:
    report = prove_broken("replica_moves", "parallel.dp=2 prove.steps=1", helper)
    assert list(report.drift) == ["norm.weight"]
    assert all(d.agrees for d in report.weights), "no tolerance would have shown it"


PIPELINE = "model.layers=5 model.residual_block=1 parallel.pp=2 parallel.vpp=2 prove.accumulation=3 prove.length=32"


def test_a_row_resent_and_counted_twice_fails(helper: Helper) -> None:
    report = prove_broken("row_resent", PIPELINE, helper)
    assert not report.losses[0].agrees
    assert next(d.name for d in report.outputs if not d.agrees).startswith("layers.4"), "the last stage's layer"


@pytest.mark.parametrize("how", ["row_returned_by_two_stages", "row_kept_unreturned"])
def test_a_row_whose_gradient_is_not_returned_once_fails(how: str, helper: Helper) -> None:
    report = prove_broken(how, PIPELINE, helper)
    assert all(d.agrees for d in report.outputs) and report.losses[0].agrees, "the forward pass does not show it"
    names = differing(report)
    assert "embedding.weight" in names and "layers.0.attention.q_proj.weight" in names
    assert not any(name.startswith(("layers.4", "mtp", "head")) for name in names), "the last stage's own gradients are right"


def test_rows_of_the_micro_batch_before_fail(helper: Helper) -> None:
    report = prove_broken("rows_one_micro_batch_late", PIPELINE, helper)
    assert all(d.agrees for d in report.outputs), "the first micro-batch has none before it"
    assert not report.losses[0].agrees and not report.passed


def test_ends_that_keep_their_own_gradients_fail(helper: Helper) -> None:
    report = prove_broken("embedding_copy_unsummed", PIPELINE, helper)
    assert differing(report) == ["embedding.weight"]
    assert report.drift == {"embedding.weight": ["pipeline"]}


def test_a_step_that_fails_leaves_no_rows(helper: Helper) -> None:
    (first, second) = helper.run_ranks("tests.equivalence.ranks:rows_after_a_failure", 2, config(PIPELINE))
    assert first == (2, 0) and second == (1, 0)
