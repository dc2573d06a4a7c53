from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what tests/recipes/small_phases.py says: the run `base`, its corpus, and tasks."""
    from tests.recipes.small_phases import make_home

    return make_home(tmp_path_factory.mktemp("pretrained"))
