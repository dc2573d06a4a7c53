"""Completion in a real shell, and sweeps."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recipes import cli, sweep
from recipes.completion import candidates
from recipes.errors import UserError
from tests.recipes.small_run import words, write_corpus

BIN = Path(sys.executable).parent


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        (["pre"], ["pretrain"]),
        (["pretrain", "model=na"], ["model=nano"]),
        (["pretrain", "optim.clip.ta"], ["optim.clip.tau="]),
        (["pretrain", "optim.clip.enabled="], ["optim.clip.enabled=", "optim.clip.enabled=false", "optim.clip.enabled=true"]),
        (["pretrain", "optim.lr=1", "model.balance"], []),
        (["cards", "optim.l"], []),
        (["bench", "own"], ["owners"]),
        (["help", "exp"], ["export"]),
        (["pretain", "x"], []),
    ],
)
def test_candidates(typed: list[str], found: list[str]) -> None:
    assert candidates(typed) == found


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes() -> None:
    script = f"""
    export PATH={BIN}:$PATH
    eval "$(k3 completion bash)"
    COMP_LINE='k3 pretrain model=na' COMP_POINT=20; _k3 2>/dev/null; echo "${{COMPREPLY[*]}}"
    COMP_LINE='k3 pretrain optim.clip.ta' COMP_POINT=25; _k3 2>/dev/null; echo "${{COMPREPLY[*]}}"
    COMP_LINE='k3 exp' COMP_POINT=6; _k3; echo "${{COMPREPLY[*]}}"
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["nano", "optim.clip.tau=", "export"], done.stderr


def test_a_sweep_is_every_combination() -> None:
    runs = sweep.combinations(["optim.lr=1e-3,3e-3", "model=tiny", "run.steps=range(2,4)"])
    assert [name for name, _ in runs] == [f"optim.lr={lr} run.steps={n}" for lr in ("0.001", "0.003") for n in (2, 3)]
    assert all(of[0] == "model=tiny" for _, of in runs)
    with pytest.raises(UserError, match="no key has several values"):
        sweep.combinations(["optim.lr=1e-3", "parallel.split=[1,2]"])


@pytest.mark.slow
def test_a_sweep_trains_each_and_a_mistake_in_the_last_costs_nothing(tmp_path, capsys) -> None:
    write_corpus(tmp_path / "corpus")
    typed = words(tmp_path, "sweep", "run.steps=1", "run.sample_tokens=0", "optim.lr=1e-3,2e-3")
    assert cli.main(["pretrain", "--multirun", *typed, "model.layers=4,0"]) == 2
    assert "model.layers=0" in capsys.readouterr().err and not (tmp_path / "sweep").exists()
    assert cli.main(["pretrain", "-m", *typed, "model.layers=4"]) == 0
    rates = [json.loads((tmp_path / f"sweep/{n}/metrics.jsonl").read_text())["lr"] for n in (0, 1)]
    assert rates == [pytest.approx(1e-3), pytest.approx(2e-3)] and not (tmp_path / "sweep/2").exists()
