"""Every recipe has a golden script, as `k3 submit` gives it to Slurm. To write them anew: K3_GOLDEN=write pytest <this file>"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes import cli
from recipes.config import options

GOLDEN = Path(__file__).parents[1] / "slurm/golden/recipes"
WHERE = {
    "nano": ["cluster=cpu"],
    "small": ["cluster=slurm", "cluster.gpus_per_node=1", "cluster.exclusive=false"],
    "linear_48b": ["cluster=h100x8", "nodes=8"],
    **{f"k3{phase}": ["cluster=gb200_nvl72", "nodes=256"] for phase in ("", "_64k", "_256k", "_1m")},
}


@pytest.mark.parametrize("name", options("recipe"))
def test_the_script_of_each_recipe(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["submit", f"recipe={name}", *WHERE[name], f"run.dir=runs/{name}", "submit.dry_run=true"]) == 0
    text = capsys.readouterr().out.replace(str(tmp_path), "/shared/project").replace(sys.executable, "/shared/venv/bin/python")
    file = GOLDEN / f"{name}.sbatch"
    if os.environ.get("K3_GOLDEN") == "write":
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
    assert not list(tmp_path.iterdir()), "a dry run leaves nothing"


def test_the_least_nodes_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["submit", "recipe=k3", "cluster=gb200_nvl72", "nodes=255", "submit.dry_run=true"]) == 2
    said = capsys.readouterr().err
    assert "nodes=255" in said and "256" in said
