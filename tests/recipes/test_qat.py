"""`qat` as users type it: what reads it, what refuses it, proofs with it, and the export of a run that was trained with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import k3
from k3 import hf
from k3.qat import Qat, QatConfig, Rule
from recipes import cli
from recipes.compose import compose
from recipes.errors import UserError
from recipes.memory import account
from recipes.stored import find
from tests.recipes.small_run import do, write_corpus

SMALL = ["model.layers=4", "model.residual_block=2", "prove.batch=4", "prove.length=32", "prove.steps=2"]


def test_the_words_that_users_type() -> None:
    for job in ("prove", "estimate"):
        assert compose([], job=job).qat == QatConfig()
        assert compose(["qat=mxfp4"], job=job).qat == QatConfig(Qat.mxfp4)
        assert compose(["qat=mxfp4", "qat.rule=floor"], job=job).qat == QatConfig(Qat.mxfp4, Rule.floor)
    assert compose(["qat=none"]).qat == QatConfig()


@pytest.mark.parametrize(
    ("job", "words", "says"),
    [
        ("pretrain", ["qat=mxfp4"], "qat=mxfp4: quantisation-aware training belongs to the phases after pretraining"),
        ("submit", ["qat=mxfp4"], "give qat=none"),
        ("prove", ["qat.rule=floor"], "qat.rule: has no effect, because qat=none quantises nothing"),
        ("prove", ["qat=mxfp8"], "there are none, mxfp4"),
        ("prove", ["qat=mxfp4", "qat.rule=up"], "qat.rule"),
        ("prove", ["qat=mxfp4", "model.moe.expert_size=48"], "model.moe.expert_size=48: qat=mxfp4 scales blocks of 32"),
        ("prove", ["qat=mxfp4", "model.moe.experts=0"], "qat=mxfp4: the model has no routed experts"),
    ],
    ids=str,
)
def test_refusals(job: str, words: list[str], says: str) -> None:
    with pytest.raises(UserError) as caught:
        compose(words, job=job)
    assert says in str(caught.value)


def test_the_estimate_counts_what_a_step_keeps() -> None:
    words = ["model=tiny", "precision=bf16", "parallel.dp=2", "parallel.ep=2"]
    with_, without = (account(compose([*words, f"qat={name}"], job="estimate")) for name in ("mxfp4", "none"))
    tiny = k3.preset("tiny")
    experts = tiny.moe.experts // 2 * 3 * tiny.moe.expert_size * tiny.moe.latent_size
    places = tiny.layers - tiny.dense_layers + tiny.mtp_layers
    assert with_[0].memory.buffers - without[0].memory.buffers == 2 * experts * places  # bytes, in bf16


LAYOUTS = [
    "parallel.tp=2",
    "parallel.pp=2",
    "parallel.ep=2 parallel.dp=2",
    "parallel.cp=2",
    "parallel.dp=2 activations.feed_forward=recompute",
]


# where the last bit of an input decides about a code of MXFP8, what a layout differs by is not what float32 differs from float64
FLIPS = pytest.mark.xfail(reason="float32 under tp=2: 3 of 265 gradients 1.9e-5 apart, tolerance 1e-5; docs/log.md", strict=False)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=FLIPS), "bfloat16"])
@pytest.mark.parametrize("layout", [*LAYOUTS, "parallel.tp=2 parallel.cp=2 parallel.ep=4"])
def test_layouts_are_proved(layout: str, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["prove", "qat=mxfp4", *layout.split(), f"prove.dtype={dtype}"])
    said = capsys.readouterr().out
    assert code == 0, said
    assert "quantised   routed experts: weights MXFP4" in said and ("tolerances" in said) == (dtype != "float64")


def test_a_small_layout_is_proved(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["prove", "qat=mxfp4", "qat.rule=floor", "parallel.dp=2", "parallel.ep=2", *SMALL])
    assert code == 0, capsys.readouterr().out
    assert "scale rule floor" in capsys.readouterr().out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run whose checkpoint says that it was trained with qat=mxfp4 qat.rule=floor."""
    home = tmp_path_factory.mktemp("qat")
    write_corpus(home / "corpus")
    code, folder = do(home, "run", "run.steps=2", "run.sample_tokens=0", "model.layers=4")
    assert code == 0
    last = find(folder)
    assert last is not None
    facts = json.loads((last / "state.json").read_text())
    assert facts["config"]["qat"] == {"name": "none", "rule": "rceil"}
    facts["config"]["qat"] = {"name": "mxfp4", "rule": "floor"}
    (last / "state.json").write_text(json.dumps(facts))
    return folder


def test_a_run_is_exported_with_the_weights_and_the_rule_it_was_trained_with(folder: Path, tmp_path: Path) -> None:
    assert cli.main(["export", f"run_or_checkpoint={folder}", f"out={tmp_path / 'own'}"]) == 0
    trained = hf.load(folder / "hf", qat=QatConfig(Qat.mxfp4, Rule.floor))  # the same weights, as they were exported without qat
    hf.save(trained, tmp_path / "want", quantise="mxfp4")
    own, want = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("own", "want"))
    assert own == want
    hf.save(hf.load(folder / "hf"), tmp_path / "rceil", quantise="mxfp4")
    assert own != (tmp_path / "rceil/model.safetensors").read_bytes()
    assert cli.main(["export", f"run_or_checkpoint={folder}", f"out={tmp_path / 'bare'}", "quantise=none"]) == 0
    assert (tmp_path / "bare/model.safetensors").read_bytes() == (folder / "hf/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["rule=rceil"], "rule=rceil: the model was trained with qat.rule=floor; leave it out"),
        (["rule=up"], "rule=up: give one of rceil, floor"),
        (["quantise=none", "rule=floor"], "rule=floor: has no effect"),
    ],
)
def test_another_rule_is_refused(
    folder: Path, tmp_path: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["export", f"run_or_checkpoint={folder}", f"out={tmp_path / 'out'}", *words]) == 2
    assert says in capsys.readouterr().err and not (tmp_path / "out").exists()
