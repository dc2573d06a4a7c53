"""Every benchmark of `k3 bench` is there, takes the keys that it is said to take, and ends as a command does."""

from __future__ import annotations

import inspect
import typing

import pytest

from recipes import cli


@pytest.mark.parametrize("name", cli.BENCHES)
def test_it_takes_its_keys_and_returns_an_exit_code_or_nothing(name: str) -> None:
    """Anything else would be taken for a code, after minutes of measuring."""
    bench = cli.BENCHES[name]
    function = cli._load(bench.run)
    taken = inspect.signature(function).parameters
    assert tuple(taken) == bench.keys and all(one.default is not inspect.Parameter.empty for one in taken.values())
    assert typing.get_type_hints(function)["return"] in (int, type(None))
