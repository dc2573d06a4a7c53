"""Every test runs on one thread with compilation off, as a rank on the CPU does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

if TYPE_CHECKING:
    from parallel.local import Helper


@pytest.fixture(scope="session")
def helper() -> Iterator[Helper]:
    """The process that the ranks of all tests are forked from, in a fraction of a second each; see parallel/local.py."""
    from parallel.local import Helper

    with Helper() as running:
        yield running
