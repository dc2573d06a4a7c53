"""`k3 draft`: the model it begins with stays to the bit, the draft is measured before and after, and a resume is the same run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import k3
from k3 import hf
from k3.cards import describe
from recipes.compose import compose
from recipes.errors import UserError
from recipes.phases.draft import RECORD
from recipes.stored import Stored, find
from recipes.training import train
from tests.recipes.small_run import curve, do, same_checkpoint, words, write_corpus
from tests.recipes.test_resume import go_back

STEPS = ("run.steps=4", "checkpoint.every=2", "checkpoint.keep_last=9", "run.eval_every=0", "run.sample_tokens=0")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("draft")
    write_corpus(home / "corpus")
    assert do(home, "base", "run.steps=4", "run.sample_tokens=0")[0] == 0
    return home


def typed(home: Path, run: str, *more: str) -> list[str]:
    own = words(home, run, f"run.init={home / 'base'}", "draft.steps=3", *STEPS, *more)
    return [word for word in own if not word.startswith("model=")]


@pytest.fixture(scope="module")
def drafted(home: Path) -> Path:
    assert train(compose(typed(home, "drafted"), "draft")) == 0
    return home / "drafted"


def tensors(run: Path) -> dict[str, torch.Tensor]:
    stored = Stored(find(run) or run)
    names = [f"model.{name}" for name in describe(stored.config)]
    return {n: stored.tensors.read(n, tuple((0, s) for s in stored.tensors.shape(n))) for n in names}


def test_the_model_stays_to_the_bit_and_the_draft_does_not(home: Path, drafted: Path) -> None:
    before, after = tensors(home / "base"), tensors(drafted)
    assert set(after) - set(before) == {"model.mtp.0.draft_proj.weight"}
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and all(name.startswith("model.mtp.0.") for name in moved)
    first = torch.zeros(64, 3 * 64)
    first[:, -64:].fill_diagonal_(1.0)
    assert (after["model.mtp.0.draft_proj.weight"] - first).abs().max() < 0.1
    assert not torch.equal(after["model.mtp.0.draft_proj.weight"], first)


def test_acceptance_is_measured_before_and_after(drafted: Path) -> None:
    records = [json.loads(line) for line in (drafted / RECORD).read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 4]
    for r in records:
        assert len(r["sampling"]) == len(r["greedy"]) == 3 and all(0 < x < 1 for x in (*r["sampling"], *r["greedy"]))
        assert 1 < r["tokens_greedy"] < 4 and 1 < r["tokens_sampling"] < 4 and 1 <= r["decoded_tokens"] <= 4
    assert records[1]["loss"] < records[0]["loss"]
    summary = (drafted / "summary.txt").read_text()
    assert all(f"draft, step {step}: after the text's own tokens the 1st" in summary for step in (0, 4))


def test_resume_is_the_same_run(home: Path, drafted: Path) -> None:
    folder = go_back(drafted, home / "back", 2)
    assert train(compose([f"run.resume={folder}", "wandb.mode=disabled"], "draft")) == 0
    assert curve(folder) == curve(drafted)
    same_checkpoint(folder / "checkpoints/step_4", drafted / "checkpoints/step_4")


def test_its_export_is_the_model_and_may_be_drafted_again(home: Path, drafted: Path) -> None:
    model = hf.load(drafted / "hf")
    assert model.k3.draft
    loaded, stored = dict(model.named_parameters()), tensors(drafted)
    assert torch.equal(loaded["mtp.0.draft_proj.weight"], stored["model.mtp.0.draft_proj.weight"])
    own = [w for w in typed(home, "more", f"data.tokenizer={drafted / 'tokenizer.json'}") if not w.startswith("run.init")]
    again = compose([*own, f"run.init={drafted / 'hf'}"], "draft")
    assert again.model.draft


def test_a_plain_mtp_layer_may_draft_too(home: Path) -> None:
    assert train(compose(typed(home, "plain", "model.draft=false", "precision=bf16"), "draft")) == 0
    before, after = tensors(home / "base"), tensors(home / "plain")
    assert set(before) == set(after)
    moved = {n for n in before if not torch.equal(before[n].to(after[n].dtype), after[n])}
    assert moved and all(name.startswith("model.mtp.0.") for name in moved)


def test_what_it_cannot_do_is_refused(home: Path) -> None:
    for word, text in (
        ("parallel.pp=3", r"parallel\.pp=3: the frozen model has no backward pass"),
        ("parallel.cp=2", r"parallel\.cp=2: what the model says of later tokens"),
        ("draft.steps=0", r"draft\.steps=0: must be at least 1"),
        ("draft.steps=31", r"data\.seq_length=32: must be at least 2 \+ draft\.steps = 33"),
        ("model.mtp_weight=0.3", r"model\.mtp_weight: has no effect"),
    ):
        with pytest.raises(UserError, match=text):
            compose(list({w.partition("=")[0]: w for w in (*typed(home, "x"), word)}.values()), "draft")
    with pytest.raises(UserError, match=r"run\.init=null: k3 draft begins with a model"):
        compose([w for w in typed(home, "x") if not w.startswith("run.init")], "draft")
    with pytest.raises(k3.ConfigError, match=r"model\.draft=True"):
        k3.K3Config(mtp_layers=0, draft=True).validate()
