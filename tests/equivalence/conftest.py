"""Ranks for the tests of this folder: one helper process for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from parallel.local import Helper


@pytest.fixture(scope="session")
def helper() -> Iterator[Helper]:
    """Forks ranks in a fraction of a second; see parallel/local.py."""
    with Helper() as running:
        yield running
