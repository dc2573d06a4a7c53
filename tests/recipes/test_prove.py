"""`k3 prove`: its batches, its judgement on traces made by hand, and whole proofs of small layouts, right and broken."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from parallel.local import Helper
from recipes import cli
from recipes.compose import compose
from recipes.config import Config, ProofDocuments, ProveConfig
from recipes.proof.batches import Batches, document_starts
from recipes.proof.compare import Report, compare, miscounted, relative
from recipes.proof.tolerances import MULTIPLE, ROUNDING, exact, from_float64
from recipes.proof.trace import Trace, merge, single, trace

SMALL = ["model.layers=3", "model.residual_block=2", "prove.batch=2", "prove.length=32", "prove.steps=2"]


# batches


@pytest.mark.parametrize("documents", list(ProofDocuments))
def test_data_ranks_together_read_what_one_process_reads(documents: ProofDocuments) -> None:
    cfg = ProveConfig(documents=documents)
    whole = Batches(cfg, 256, 2)
    ranks = [Batches(cfg, 256, 2, rank=r, of=4) for r in range(4)]
    for _ in range(2):
        want, got = next(whole), [next(r) for r in ranks]
        assert len(want.micro_batches) == cfg.accumulation and {g.tokens for g in got} == {want.tokens}
        for k, batch in enumerate(want.micro_batches):
            for name in ("tokens", "labels", "document_starts"):
                assert torch.equal(torch.cat([getattr(g.micro_batches[k], name) for g in got]), getattr(batch, name))
            assert torch.equal(torch.cat([g.micro_batches[k].loss_mask for g in got], 1), batch.loss_mask)


def test_steps_and_rows_differ() -> None:
    batches = Batches(ProveConfig(), 256, 2)
    first, second = next(batches), next(batches)
    rows = torch.cat([b.tokens for step in (first, second) for b in step.micro_batches])
    assert len(rows.unique(dim=0)) == len(rows)


def test_documents_cross_every_shard_edge() -> None:
    for row in range(8):
        starts = document_starts(ProofDocuments.crossing, row, 65)
        for edge in range(8, 64, 8):
            assert not starts[edge] and 1 <= starts[edge - 3 : edge].sum()
    many = document_starts(ProofDocuments.many, 0, 65)
    assert many[:32].sum() > 8 and not many[32:].any()
    assert document_starts(ProofDocuments.few, 3, 65).sum() == 3 and document_starts(ProofDocuments.none, 3, 65).sum() == 1


def test_padding_is_neither_target_nor_counted() -> None:
    (batch, _) = next(Batches(ProveConfig(), 256, 2)).micro_batches
    assert batch.padding is not None and batch.padding.any(1).tolist() == [False, True] * 4
    assert batch.padding[7].sum() == 64 * 7 // 16  # whole shards of eight
    for m in (0, 1):
        target = torch.nn.functional.pad(batch.padding, (0, m + 1), value=False)[:, m + 1 :]
        assert not (batch.loss_mask[m] & (batch.padding | target)).any()
    assert next(Batches(ProveConfig(padding=False), 256, 2)).micro_batches[0].padding is None


# judgement


def made(dtype: torch.dtype = torch.float64) -> Trace:
    """Two steps of two micro-batches of 4 tokens x 3 rows, two experts of four."""
    g = torch.Generator().manual_seed(0)
    chosen = torch.rand(2, 2, 4, 3, 4, generator=g).argsort(-1)[..., :2].sort(-1).values.to(torch.int16)
    counted = torch.rand(2, 2, 4, 3, generator=g) > 0.3
    load = torch.stack([chosen[s][counted[s]].long().flatten().bincount(minlength=4) for s in range(2)])
    draw = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)
    return Trace(
        processes=2,
        losses=[[5.0, 5.5], [4.0, 4.5]],
        grad_norms=[1.0, 2.0],
        skipped=[None, None],
        gradients={"a": draw(4, 4), "unread": torch.zeros(3, dtype=dtype), "b": draw(5)},
        weights={"a": draw(4, 4), "unread": draw(3), "b": draw(5), "bias": draw(4)},
        muon={"a"},
        outputs={"layers.0.attention": draw(4, 3, 8), "layers.0.feed_forward": draw(4, 3, 8)},
        chosen={"layers.0": chosen},
        gaps={"layers.0": torch.full((2, 2, 4, 3), 1e-3)},
        loads={"layers.0": load},
        counted=counted,
    )


def judge(layout: Trace, dtype: torch.dtype = torch.float64) -> Report:
    return compare(made(dtype), layout, exact(made(dtype)))


def test_equal_traces_pass() -> None:
    for dtype in (torch.float64, torch.float32):
        assert judge(made(dtype), dtype).passed


@pytest.mark.parametrize(
    "where, key, dtype, size",
    [
        ("gradients", "b", torch.float64, 1e-10),
        ("gradients", "b", torch.float32, 1e-5),
        ("weights", "a", torch.float32, 1e-5),
        ("weights", "b", torch.float32, 1e-4),
        ("weights", "b", torch.float64, 1e-10),
        ("outputs", "layers.0.feed_forward", torch.float64, 1e-10),
    ],
)
def test_tolerances_are_the_stated_ones(where: str, key: str, dtype: torch.dtype, size: float) -> None:
    for factor, passes in ((0.5, True), (2.0, False)):
        layout = made(dtype)
        getattr(layout, where)[key] = getattr(layout, where)[key].double() * (1 + factor * size)
        report = judge(layout, dtype)
        assert report.passed is passes
        assert passes or any(key in line for line in report.failures())


@pytest.mark.parametrize("dtype, size", [(torch.float64, 1e-10), (torch.float32, 1e-6)])
def test_losses_and_norms(dtype: torch.dtype, size: float) -> None:
    for factor, passes in ((0.5, True), (2.0, False)):
        layout = made(dtype)
        layout.losses[1][1] *= 1 + factor * size
        assert judge(layout, dtype).passed is passes
        layout = made(dtype)
        layout.grad_norms[0] *= 1 + factor * size
        assert judge(layout, dtype).passed is passes


def test_the_first_difference_is_named() -> None:
    layout = made()
    for name in ("a", "b"):
        layout.gradients[name] = layout.gradients[name] * 1.5
    layout.outputs["layers.0.feed_forward"] = layout.outputs["layers.0.feed_forward"] + 1
    text = "\n".join(judge(layout).failures())
    assert "gradient differs is a (5.00e-01" in text and "2 of 3 do" in text
    assert "forward pass first differs at layers.0.feed_forward" in text


def test_a_zero_gradient_must_stay_zero_and_nothing_may_be_missing() -> None:
    layout = made()
    layout.gradients["unread"] = torch.full((3,), 1e-300, dtype=torch.float64)
    assert "gradient differs is unread (inf" in next(judge(layout).failures())
    for change in (lambda t: t.weights.pop("b"), lambda t: t.gradients.update(extra=torch.ones(2))):
        layout = made()
        change(layout)
        assert not judge(layout).passed
    assert relative(math.nan, 1.0) == relative(torch.ones(2), torch.ones(3)) == math.inf and relative(0.0, 0.0) == 0


def test_drift_and_skipped_steps_fail() -> None:
    layout = made()
    layout.drift = {"b": ["tensor"]}
    assert list(judge(layout).failures()) == ["copies of b are not bitwise equal over tensor ranks"]
    layout = made()
    layout.skipped[1] = "the loss is not finite"
    assert "step 2 was skipped: the loss is not finite" in next(judge(layout).failures())
    layout.skipped[1] = "spike of the loss"
    assert "step 2 was skipped: spike of the loss" in next(judge(layout).failures()), "the single process took it"


def test_loads_must_be_what_was_routed() -> None:
    for change in (lambda load: load.mul_(2), lambda load: load[1, 3].add_(1)):
        layout = made()
        change(layout.loads["layers.0"])
        assert "loads of layers.0" in next(judge(layout).failures())
    assert not list(miscounted(made(), "it"))


@pytest.mark.parametrize(
    "dtype, gap, passes", [(torch.float32, 5e-7, True), (torch.float32, 2e-6, False), (torch.float64, 1e-9, False)]
)
def test_another_route_needs_a_small_gap(dtype: torch.dtype, gap: float, passes: bool) -> None:
    reference, layout = made(dtype), made(dtype)
    place = tuple(layout.counted[0].nonzero()[0].tolist())
    old = layout.chosen["layers.0"][(0, *place)]
    new = torch.tensor([e for e in range(4) if e not in old.tolist()], dtype=torch.int16)
    layout.loads["layers.0"][0, old.long()] -= 1
    layout.loads["layers.0"][0, new.long()] += 1
    layout.chosen["layers.0"][(0, *place)] = new
    reference.gaps["layers.0"][(0, *place)] = gap
    report = compare(reference, layout, exact(reference))
    assert report.passed is passes and len(report.routes) == 1
    assert (report.routes[0].step, report.routes[0].micro_batch, report.routes[0].token, report.routes[0].row) == (1, *place)


def test_bfloat16_tolerances_come_from_float64() -> None:
    wide, reference = made(), made()
    reference.gradients["b"] = reference.gradients["b"] * 1.1
    reference.losses[0][0] *= 1.001
    t = from_float64(reference, wide)
    assert t.gradients["b"] == pytest.approx(MULTIPLE * 0.1) and t.gradients["a"] == MULTIPLE * ROUNDING
    assert t.loss == pytest.approx(MULTIPLE * 0.001) and t.derived
    for factor, passes in ((0.25, True), (0.4, False)):
        layout = copy.deepcopy(reference)
        layout.gradients["b"] = layout.gradients["b"] * (1 + factor)
        assert compare(reference, layout, t).passed is passes


def test_float32_tolerances_with_qat_are_never_below_the_exact_ones() -> None:
    wide, reference = made(), made(torch.float32)
    near = from_float64(reference, wide)
    assert (
        near.gradients == exact(reference).gradients and near.loss == exact(reference).loss and near.gap == exact(reference).gap
    )
    reference.gradients["b"] *= 1.01
    far = from_float64(reference, wide)
    assert far.gradients["b"] == pytest.approx(MULTIPLE * 0.01, rel=1e-3) and far.gradients["a"] == near.gradients["a"]


def test_stages_merge_by_name() -> None:
    first, last = made(), made()
    first.weights, last.weights = {"a": torch.ones(1)}, {"a": torch.zeros(1), "b": torch.ones(1)}
    merged = merge([first, last])
    assert merged.weights.keys() == {"a", "b"} and merged.weights["a"].item() == 1, "the last stage's is a copy"


# whole proofs


def small(*words: str) -> Config:
    return compose([*SMALL, *words], job="prove")


@pytest.fixture(scope="module")
def reference(helper: Helper) -> Trace:
    return trace(single(small()), helper)


def test_one_process_moves_every_parameter_and_records_it(reference: Trace) -> None:
    # nothing reads the first layer's residual weights; all else has a gradient and is off its first value
    still = {name for name, g in reference.gradients.items() if not g.any()}
    assert still == {"layers.0.attention_residual.norm", "layers.0.attention_residual.query"}
    for name, weight in reference.weights.items():
        assert len(weight.unique()) > 1 and not (weight == 0).any(), name
    assert len(reference.outputs) == 9 and reference.outputs["layers.1.attention"].shape == (32, 2, 64)
    assert list(reference.loads) == ["layers.1", "layers.2", "mtp.0"] and reference.chosen["mtp.0"].shape == (2, 2, 32, 2, 2)


@pytest.mark.parametrize("layout", ["parallel.dp=2", "parallel.tp=2 parallel.ep=2", "parallel.cp=2 parallel.zero=0"])
def test_a_layout_agrees(layout: str, helper: Helper, reference: Trace) -> None:
    report = compare(reference, trace(small(*layout.split()), helper), exact(reference))
    assert report.passed, "\n".join(report.failures())


def test_divided_gradients_are_found(helper: Helper, reference: Trace) -> None:
    broken = merge(helper.run_ranks("tests.recipes.broken_ranks:divided_gradients", 2, small("parallel.dp=2"))[:1])
    text = "\n".join(compare(reference, broken, exact(reference)).failures())
    assert "the first parameter whose gradient differs is embedding.weight (5.00e-01" in text
    assert "the first forward pass agrees in all 9 parts" in text and "gradient norm differs first at step 1" in text


def test_a_drifting_copy_is_found(helper: Helper, reference: Trace) -> None:
    broken = merge(helper.run_ranks("tests.recipes.broken_ranks:drifting_copy", 2, small("parallel.dp=2"))[:1])
    failures = list(compare(reference, broken, exact(reference)).failures())
    assert failures == ["copies of layers.2.input_layernorm.weight are not bitwise equal over data ranks"]


def test_other_tokens_are_no_proof(helper: Helper, reference: Trace) -> None:
    assert not compare(reference, trace(single(small("prove.documents=none")), helper), exact(reference)).passed


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["prove", *SMALL[:-1], "parallel.dp=2", "prove.steps=1"]) == 0
    out = capsys.readouterr().out
    assert "dp 2" in out and "traffic     data: " in out and out.splitlines()[-1] == "PASS"


@pytest.mark.parametrize(
    "words, message",
    [
        ("parallel.tp=4 parallel.dp=4", "= 16: a proof runs at most 8 processes"),
        ("parallel.dp=3", "prove.batch=8: must be a multiple of parallel.dp=3"),
        ("parallel.tp=3", "parallel.tp=3: must divide model.kda.heads"),
        ("parallel.cp=3", "must be a multiple of cp * tp"),
        ("prove.length=16", "prove.length=16: must be at least 32 with prove.documents=crossing"),
        ("prove.steps=0", "prove.steps=0: must be at least 1"),
        ("run.steps=3", "k3 prove does not read run"),
        ("prove.dtype=float16", "float16"),
    ],
)
def test_mistakes_are_one_message(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["prove", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_training_does_not_read_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pretrain", "prove.steps=2", "--cfg", "job"]) == 2
    assert "k3 pretrain does not read prove" in capsys.readouterr().err
    assert cli.main(["pretrain", "--cfg", "job"]) == 0 and "prove:" not in capsys.readouterr().out
