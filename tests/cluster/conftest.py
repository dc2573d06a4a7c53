"""One cluster for all tests of this folder."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.loopback import Loopback, Unavailable, install


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    root: Path = tmp_path_factory.mktemp("slurm")
    running = None
    try:
        install()
        running = Loopback(root)
        running.start()
        yield running
    except Unavailable as error:
        warnings.warn(f"NO SLURM HERE, so nothing of tests/cluster was tested: {error}", stacklevel=1)
        pytest.skip(f"NO SLURM HERE: {error}")
    finally:
        if running is not None:
            running.stop()
