"""`k3 inspect` and `k3 export` of what runs leave, whatever layout wrote it."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file

from recipes import cli
from tests.recipes.small_run import do, words, write_corpus


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("stored")
    write_corpus(home / "corpus")
    return home


SHORT = ("run.steps=2", "run.sample_tokens=0", "model.layers=4")


@pytest.fixture(scope="module")
def folder(home):
    code, folder = do(home, "run", *SHORT)
    assert code == 0
    return folder


def same_folder(one, other):
    mine, theirs = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert (one / "config.json").read_text() == (other / "config.json").read_text()


def test_inspect_says_what_is_there(folder, capsys, home):
    assert cli.main(["inspect", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "a checkpoint of format 2, after step 2" in said and "tokens    256" in said and "written   by 1 process\n" in said
    count = sum(t.numel() for t in load_file(folder / "hf/model.safetensors").values())
    counted = sum(int(n.replace(",", "")) for n in re.findall(r"^model: \w[\w ]*?  +([\d,]+) ", said, re.M))
    assert counted >= count and re.search(r"^optimizer +[\d,]+ +[\d,]+  \d+ ", said, re.M) and "model: expert" in said
    assert cli.main(["inspect", str(folder / "hf")]) == 0
    assert f"{folder / 'hf'}: a published folder\nweights   {count:,} parameters" in capsys.readouterr().out
    assert cli.main(["inspect", str(home / "corpus")]) == 2
    assert "neither a run folder, nor a checkpoint, nor a published folder" in capsys.readouterr().err


def test_an_exported_checkpoint_is_what_the_run_itself_exports(folder, tmp_path, capsys):
    assert cli.main(["export", f"run_or_checkpoint={folder}", f"out={tmp_path / 'out'}"]) == 0
    same_folder(tmp_path / "out", folder / "hf")
    assert cli.main(["export", f"run_or_checkpoint={folder}", f"out={tmp_path / 'packed'}", "quantise=mxfp4"]) == 0
    assert any(name.endswith("_packed") for name in load_file(tmp_path / "packed/model.safetensors"))
    capsys.readouterr()
    for typed, says in (
        (["out=x"], "run_or_checkpoint: not given"),
        ([f"run_or_checkpoint={folder}", f"out={tmp_path / 'out'}"], "exists already"),
        ([f"run_or_checkpoint={tmp_path}", "out=x"], "neither a run folder nor a checkpoint"),
        (["run_or_checkpoint=x", "uot=x"], "no such key of k3 export; the nearest is out"),
    ):
        assert cli.main(["export", *typed]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_is_exported_by_one(home, helper, tmp_path, capsys):
    typed = words(home, "ranks", *SHORT, "parallel.dp=2", "parallel.ep=2")
    helper.run_ranks("tests.recipes.ranks:train", 2, typed, str(home / "ranks.log"))
    assert cli.main(["export", f"run_or_checkpoint={home / 'ranks'}", f"out={tmp_path / 'out'}"]) == 0
    same_folder(tmp_path / "out", home / "ranks/hf")
    assert cli.main(["inspect", str(home / "ranks/checkpoints/step_2")]) == 0
    assert "written   by 2 processes: parallel.ep=2 parallel.dp=2" in capsys.readouterr().out
