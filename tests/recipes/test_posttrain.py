"""`k3 posttrain`: its words, its table, and (slow) the whole chain on real tasks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipes import cli, posttrain
from recipes.chain import stages as chained
from recipes.compose import compose
from recipes.errors import UserError
from recipes.exam import RECORD
from recipes.phases import PHASES


def test_every_stage_composes(tmp_path: Path) -> None:
    """With the model of the run before, which is yet to come."""
    model = None
    for stage in posttrain.stages(tmp_path):
        init = [] if stage.after is None else [f"run.init={tmp_path / stage.after}"]
        if stage.phase != "distill":  # whose experts are opened
            cfg = compose([*init, *stage.words], stage.phase, after=model)
            model = model or cfg.model


def test_words_are_for_a_stage_or_for_all() -> None:
    folder, own = posttrain._read(["dir=x", "sft:optim.lr=1e-3", "wandb.mode=disabled", "rl-numbers:run.steps=3"])
    assert folder == Path("x")
    assert own == {"sft": ["optim.lr=1e-3"], "": ["wandb.mode=disabled"], "rl-numbers": ["run.steps=3"]}
    with pytest.raises(UserError, match="no such stage; the nearest is sft"):
        posttrain._read(["sfft:run.steps=3"])


@pytest.mark.parametrize("stage, phase", [("sft", "sft"), ("rl-relations", "rl"), ("distill", "distill")])
def test_a_later_stages_mistake_is_told_before_the_first_begins(tmp_path: Path, stage: str, phase: str) -> None:
    with pytest.raises(UserError, match=f"^{stage}: run.stepz=3: there is no key run.stepz; the nearest is run.steps"):
        posttrain.run([f"dir={tmp_path / 'x'}", f"{stage}:run.stepz=3"])
    with pytest.raises(UserError, match=f"^{stage}: exam.samples=-1: must be"):
        posttrain.run([f"dir={tmp_path / 'x'}", f"{stage}:exam.samples=-1"])
    assert not (tmp_path / "x").exists()


def test_help_names_the_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["posttrain", "--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n  {stage.name} " in said for stage in posttrain.stages(Path("x"))) and "dir=runs/posttrain" in said


def _exam(folder: Path, *each: dict[str, list[bool]]) -> None:
    folder.mkdir()
    with (folder / RECORD).open("w") as file:
        for step, of in enumerate(each):
            right = [r for name in of for r in of[name]]
            domains = [name for name in of for _ in of[name]]
            record = {
                "step": step,
                "right": right,
                "domains": domains,
                "tokens": [1] * len(right),
                "cut": [0] * len(right),
                "guesses": dict.fromkeys(of, 0.25),
            }
            file.write(json.dumps(record) + "\n")


def test_the_report_counts_what_is_kept_of_a_gain(tmp_path: Path) -> None:
    def share(right: int) -> list[bool]:
        return [i < right for i in range(100)]

    names = [name for of in posttrain.EXPERTS.values() for name in of]
    _exam(tmp_path / "sft", {n: share(0) for n in names}, {n: share(40) for n in names})
    for kind, of in posttrain.EXPERTS.items():
        _exam(tmp_path / f"rl-{kind}", {n: share(40) for n in of}, {n: share(60) for n in of})
    _exam(tmp_path / "distill", {n: share(40) for n in names}, {n: share(55) for n in names})
    found = posttrain.report(tmp_path)
    assert all(found[n]["gain_rl"][0] == pytest.approx(0.2) and found[n]["base"]["share"] == 0 for n in names)
    assert all(found[f"rl-{kind}"]["kept"] == pytest.approx(0.75) for kind in posttrain.EXPERTS)
    said = "\n".join(posttrain.text(found))
    assert "significant" in said and all(found[n]["guess"] == 0.25 for n in names)
    assert "75% of that (less than 90%)" in said
    assert (tmp_path / "posttrain.png").stat().st_size > 1000


def test_all_phases_are_links_of_a_chain() -> None:
    words = ["chain=[pretrain,extend,sft,rl]", "cluster=cpu", "model=tiny", "rl:run.steps=5", "recipe=nano"]
    links = chained([w for w in words if not w.startswith("model=")], list(PHASES))
    assert [link.cfg.phase for link in links] == ["pretrain", "extend", "sft", "rl"]
    assert links[3].cfg.run.steps == 5 and links[1].cfg.data.seq_length == 1024
    assert links[3].cfg.data.tokenizer == f"{links[2].cfg.run.dir}/tokenizer.json"
    assert links[2].cfg.qat.name.name == "mxfp4" and links[1].cfg.qat.name.name == "none"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the whole chain has reached."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    command = [sys.executable, "-m", "recipes.cli", "posttrain", f"dir={folder}", "wandb.mode=disabled"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    return json.loads((folder / "posttrain.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_chain_raises_answers(whole: dict[str, Any]) -> None:
    said = "\n".join(posttrain.text(whole))
    assert whole["all"]["gain_sft"][1] > 0.05, f"SFT: well above the base model\n{said}"
    for kind in posttrain.EXPERTS:
        assert whole[f"rl-{kind}"]["gain_rl"][1] > 0, f"RL: {kind} is significantly further\n{said}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_student_keeps_what_each_expert_gained(whole: dict[str, Any]) -> None:
    for kind in posttrain.EXPERTS:
        assert whole[f"rl-{kind}"]["kept"] >= posttrain.KEPT, "\n".join(posttrain.text(whole))
