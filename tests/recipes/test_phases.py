"""`k3 extend|sft|rl|distill|eval` from a pretrained run to a summary, and killed and resumed bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from recipes.compose import compose
from recipes.dialogue import Dialogue
from recipes.evaluate import evaluate
from recipes.faults.same import different_facts, different_metrics
from tests.recipes.small_phases import STOP, by_parity, resume, run
from tests.recipes.small_run import metrics, same_checkpoint

PARTIAL = ("rl.complete=0.5", "rl.budget.start=2", "rl.budget.end=0.5")
CASES: dict[str, tuple[str, ...]] = {  # name -> verb and words
    "extend": ("extend", "data.long.recall=0.5"),
    "sft": ("sft",),
    "rl": ("rl",),
    "partial": ("rl", *PARTIAL),
    "distill": ("distill", "rl.complete=0.5"),
}


@pytest.fixture(autouse=True)
def rewarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dialogue, "judge", by_parity)
    monkeypatch.setattr(Dialogue, "stop", property(lambda self: STOP))


@pytest.fixture(scope="module")
def whole(pretrained: Path) -> dict[str, Path]:
    """The uninterrupted runs, by case, as they are asked for."""
    return {}


def of(case: str, pretrained: Path, whole: dict[str, Path]) -> Path:
    if case not in whole:
        verb, *more = CASES[case]
        code, whole[case] = run(pretrained, verb, f"whole-{case}", *more)
        assert code == 0
    return whole[case]


MEASURED = {  # in summary.json and among the pictures
    "extend": ("recall", "recall.png"),
    "sft": ("exam", "exam.png"),
    "rl": ("exam", "rollouts.png"),
    "partial": ("exam", "rollouts.png"),
    "distill": ("exam", "rollouts.png"),
}


def marked(quick: set[str]) -> list[object]:
    return [pytest.param(case, marks=[pytest.mark.slow] * (case not in quick)) for case in CASES]


@pytest.mark.parametrize("case", marked({"sft", "partial"}))
def test_a_phase_runs_to_its_summary(case: str, pretrained: Path, whole: dict[str, Path]) -> None:
    folder = of(case, pretrained, whole)
    summary = json.loads((folder / "summary.json").read_text())
    name, picture = MEASURED[case]
    assert summary["steps"] == 4 and set(summary[name]) == {"before", "after"}
    assert (folder / picture).is_file() and (folder / "hf/config.json").is_file()
    assert (folder / "tokenizer.json").read_text() == (folder / "hf/tokenizer.json").read_text(), "any job may begin with hf"
    assert compose([f"run.init={folder / 'hf'}"], "eval").data.tokenizer == str(folder / "hf/tokenizer.json")
    records = metrics(folder)
    assert [r["step"] for r in records] == [1, 2, 3, 4] and all(r["grad_norm"] > 0 for r in records)
    assert summary["idle_steps"] == sum("idle" in r for r in records) < 4
    if case in ("rl", "partial"):
        assert any(r["rl/mixed_groups"] > 0 for r in records) and all(r["policy/mismatch"] < 1e-4 for r in records)
    if case == "partial":
        assert any(r["rl/stale"] > 0 for r in records) and {"rl/budget/sums", "rl/budget/words"} <= records[0].keys()
    if case == "distill":
        assert all(r["policy/mismatch"] < 1e-4 for r in records)


@pytest.mark.parametrize("case", marked({"partial"}))
def test_a_phase_is_resumed_bit_for_bit(case: str, pretrained: Path, whole: dict[str, Path]) -> None:
    first = of(case, pretrained, whole)
    folder = pretrained / f"back-{case}"
    shutil.copytree(first, folder)
    for file in ("summary.json", "summary.txt"):
        (folder / file).unlink()
    for step in (2, 3, 4):
        shutil.rmtree(folder / f"checkpoints/step_{step}")
    (folder / "checkpoints/latest").write_text("step_1\n")
    torch.manual_seed(99)  # what the process drew before must not matter
    verb, *_ = CASES[case]
    assert resume(folder, verb) == 0
    same_checkpoint(folder / "checkpoints/step_4", first / "checkpoints/step_4")
    assert list(different_metrics(folder, first)) == []
    assert list(different_facts(folder / "checkpoints/step_4", first / "checkpoints/step_4")) == []
    for record in ("exams.jsonl", "recall.jsonl"):
        assert (folder / record).is_file() == (first / record).is_file()
        if (first / record).is_file():
            assert (folder / record).read_text() == (first / record).read_text()


def test_states_wait_in_the_checkpoint(pretrained: Path, whole: dict[str, Path]) -> None:
    """Or resuming partial rollouts would show nothing."""
    folder = of("partial", pretrained, whole)
    facts = json.loads((folder / "checkpoints/step_1/state.json").read_text())["stream"]
    waiting = [one for group in facts["waiting"] for one in group["trajectories"]]
    assert any(one["tokens"] and one["finished"] is None for one in waiting)
    assert facts["states"]["ranks"][0] and facts["lengths"]


@pytest.mark.parametrize("what", ["heldout", "tasks", "recall", "context", "draft"])
def test_eval_measures_what_it_is_asked(what: str, pretrained: Path) -> None:
    texts = [f"data.corpus={pretrained / 'corpus'}", f"data.cache={pretrained / 'cache'}", "data.seq_length=128"]
    more = {
        "heldout": [*texts, "data.heldout_tokens=300"],
        "tasks": ["tasks.generators=[]", f"tasks.folder={pretrained / 'tasks'}", "tasks.heldout=4", "exam.max_new_tokens=4"],
        "recall": [*texts, "recall.rows=2"],
        "context": [*texts, "data.heldout_tokens=512", "recall.lengths=[64,128]"],
        "draft": [*texts, "data.heldout_tokens=300", "draft.steps=2"],
    }[what]
    out = pretrained / f"eval-{what}.json"
    assert evaluate(compose([f"run.init={pretrained / 'base'}", f"eval.what=[{what}]", f"eval.out={out}", *more], "eval")) == 0
    found = json.loads(out.read_text())[what]
    names = {
        "heldout": {"loss", "bigram"},
        "tasks": {"all", "sums", "words"},
        "recall": {"128"},
        "context": {"rows", "places"},
        "draft": {"sampling", "greedy", "tokens_greedy", "decoded_tokens"},
    }
    assert names[what] <= found.keys()
    if what == "context":
        assert found["rows"].keys() == {"64", "128"} and found["places"].keys() == {"0-64", "64-128"}
        assert sum(found["places"].values()) / 2 == pytest.approx(found["rows"]["128"], rel=1e-6)
