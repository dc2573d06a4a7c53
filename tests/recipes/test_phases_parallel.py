"""`k3 rl` in several processes: what one samples, and resumed by its own layout and by another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from parallel.local import Helper
from tests.recipes.small_phases import words
from tests.recipes.small_run import metrics, same_checkpoint

pytestmark = pytest.mark.slow
STILL = ("optim.lr=1e-30", "run.steps=2", "exam.enabled=false")


def ranks(helper: Helper, home: Path, name: str, *more: str, size: int = 2) -> list[dict]:
    given = [w for w in words(home, "rl", name, *more) if not ("enabled=false" in " ".join(more) and w.startswith(LEFT))]
    return helper.run_ranks("tests.recipes.rl.ranks:phase", size, "rl", given, str(home / f"{name}.log"))


LEFT = ("exam.max_new_tokens", "tasks.heldout", "run.eval_every")


def test_two_data_ranks_sample_what_one_process_does(pretrained: Path, helper: Helper) -> None:
    """Draws depend on keys alone."""
    (alone,) = ranks(helper, pretrained, "alone", *STILL, size=1)
    both = ranks(helper, pretrained, "both", *STILL, "parallel.dp=2", "parallel.ep=2")
    assert alone["code"] == 0 and [one["code"] for one in both] == [0, 0]
    assert both[0]["told"] == both[1]["told"] == alone["told"]
    for mine, theirs in zip(metrics(pretrained / "both"), metrics(pretrained / "alone")):
        for key in ("loss", "grad_norm", "policy/entropy", "rl/reward", "rl/tokens", "rl/score/sums"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-7), key


def back(home: Path, name: str, to: str, step: int) -> Path:
    folder = home / to
    shutil.copytree(home / name, folder)
    (folder / "summary.json").unlink()
    for path in (folder / "checkpoints").glob("step_*"):
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)
    (folder / "checkpoints/latest").write_text(f"step_{step}\n")
    return folder


def test_rollouts_that_wait_go_on_in_their_layout_and_in_another(pretrained: Path, helper: Helper) -> None:
    found = ranks(helper, pretrained, "pair", "rl.complete=0.5", "parallel.dp=2")
    assert [one["code"] for one in found] == [0, 0]
    facts = json.loads((pretrained / "pair/checkpoints/step_1/state.json").read_text())["stream"]
    assert any(facts["states"]["ranks"]), "nothing waits, so nothing is shown"
    folder = back(pretrained, "pair", "again", 1)
    found = helper.run_ranks("tests.recipes.rl.ranks:phase", 2, "rl", [f"run.resume={folder}"], str(pretrained / "again.log"))
    assert [one["code"] for one in found] == [0, 0]
    same_checkpoint(folder / "checkpoints/step_4", pretrained / "pair/checkpoints/step_4")
    for name, layout, size in (("one", ["parallel.dp=1"], 1), ("tensor", ["parallel.dp=1", "parallel.tp=2"], 2)):
        folder = back(pretrained, "pair", f"as-{name}", 1)
        line = [f"run.resume={folder}", *layout]
        found = helper.run_ranks("tests.recipes.rl.ranks:phase", size, "rl", line, str(pretrained / f"{name}.log"))
        assert [(one["code"], one["step"]) for one in found] == [(0, 4)] * size
        assert len(metrics(folder)) == 4
