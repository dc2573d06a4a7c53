"""Every recipe composes, fits its GPU by the estimate, is in the README, and its shrunk layout computes what one process does."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel.config import world_size
from parallel.local import Helper
from recipes import cli
from recipes.compose import compose
from recipes.config import options
from recipes.errors import UserError
from recipes.gpus import SPECS
from recipes.memory import account
from recipes.prove import check, prove
from recipes.shrink import shrunk

NAMES = options("recipe")
README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_ladder_is_there():
    assert set(NAMES) >= {"nano", "small", "linear_48b", "k3", "k3_64k", "k3_256k", "k3_1m"}


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_composes_fits_and_is_named(name: str):
    cfg = compose([f"recipe={name}"], job="estimate")
    assert compose([f"recipe={name}"]).data == cfg.data
    if cfg.gpu is not None:
        most = max(rank.memory.total for rank in account(cfg))
        assert most <= SPECS[cfg.gpu].memory * cfg.estimate.memory
    assert f"`{name}`" in README
    check(compose([f"recipe={name}"], job="prove"))


def test_recipes_keep_their_promises():
    phases = [compose([f"recipe={name}"], job="estimate") for name in ("k3", "k3_64k", "k3_256k", "k3_1m")]
    assert [cfg.data.seq_length for cfg in phases] == [2**13, 2**16, 2**18, 2**20]
    assert {cfg.data.seq_length * cfg.data.batch_size for cfg in phases} == {2**26}
    assert {world_size(cfg.parallel) for cfg in phases} == {1024}
    assert all(cfg.parallel.tp == 1 and cfg.parallel.vpp > 1 and cfg.parallel.zero == 1 for cfg in phases[:3])
    assert world_size(compose(["recipe=linear_48b"]).parallel) == 64


def test_typed_words_come_after_the_recipe():
    cfg = compose(["model=dense", "recipe=nano", "data.batch_size=8"])
    assert cfg.data.batch_size == 8 and cfg.model.moe.experts == 0
    assert compose(["recipe=k3", "parallel.dp=64"], job="estimate").parallel.dp == 64


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["pretrain", "recipe=k3_64"], "recipe=k3_64: no such recipe; the nearest is k3_64k"),
        (["pretrain", "recipes=k3"], "there is no key recipes; the nearest is recipe"),
        (["cards", "recipe=k3"], "recipe"),
    ],
)
def test_what_is_no_recipe_is_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(words) == 2
    assert says in capsys.readouterr().err


def test_a_run_is_not_continued_with_a_recipe(tmp_path: Path):
    from recipes.compose import save_resolved

    save_resolved(compose(["recipe=nano", f"run.dir={tmp_path}"]), tmp_path / "config.yaml")
    with pytest.raises(UserError, match="recipe=small: a run continues with its own configuration"):
        compose([f"run.resume={tmp_path}", "recipe=small"])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_shrunk_layout_passes_a_proof(name: str, helper: Helper, capsys: pytest.CaptureFixture[str]):
    cfg = compose([f"recipe={name}", "prove.steps=2"], job="prove")
    assert world_size(cfg.parallel) <= 8 and len(shrunk(name)) > 2
    assert prove(cfg, helper) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "PASS"
