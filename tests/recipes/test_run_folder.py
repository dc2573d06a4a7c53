"""A refused run leaves no folder behind, and a copy without `latest` still has its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from data import DataError
from parallel import checkpoint
from parallel.checkpoint_folder import STATE
from recipes.compose import compose
from recipes.training import train


def test_a_run_refused_for_its_corpus_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    cfg = compose([f"data.corpus={tmp_path / 'empty'}", f"run.dir={tmp_path / 'run'}", f"data.cache={tmp_path / 'cache'}"])
    with pytest.raises(DataError, match="empty"):
        train(cfg)
    assert not (tmp_path / "run").exists()


def test_a_missing_pointer_loses_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    for step in (3, 20, 5):
        (tmp_path / f"step_{step}").mkdir()
        (tmp_path / f"step_{step}" / STATE).write_text("{}")
    (tmp_path / "step_40").mkdir()  # never finished
    assert checkpoint.latest(tmp_path) == tmp_path / "step_20"
