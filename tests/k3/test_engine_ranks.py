"""Generation under tensor, expert, data and context ranks gives what one process gives; pipelines are refused."""

from __future__ import annotations

import pytest

from parallel.config import ParallelConfig, world_size
from parallel.local import Helper, RankError

TARGET = "tests.k3.engine_ranks:generate"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ranks_generate_the_tokens_of_one_process(temperature: float, helper: Helper) -> None:
    (want,) = helper.run_ranks(TARGET, 1, {}, temperature, False)
    shared = ({"tp": 2}, {"tp": 2, "sp": False, "ep": 2})
    for sizes in shared:
        for got in helper.run_ranks(TARGET, 2, sizes, temperature, False):
            assert got == want, sizes
    for sizes in ({"ep": 2, "dp": 2}, {"cp": 2, "ep": 2}, {"dp": 2}):
        got = helper.run_ranks(TARGET, world_size(ParallelConfig(**sizes)), sizes, temperature, True)
        assert len(got[0]) != len(got[1])
        for rank in got:
            assert rank == {key: want[key] for key in rank}, sizes


def test_ranks_with_a_draft_generate_the_same(helper: Helper) -> None:
    (want,) = helper.run_ranks(TARGET, 1, {}, 1.0, False)
    for got in helper.run_ranks(TARGET, 2, {"tp": 2}, 1.0, False, 2):
        assert got == want
    got = helper.run_ranks(TARGET, 2, {"ep": 2, "dp": 2}, 1.0, True, 2)
    for rank in got:
        assert rank == {key: want[key] for key in rank}


def test_pipelines_are_refused(helper: Helper) -> None:
    with pytest.raises(RankError, match=r"parallel\.pp=2: generation needs all layers on a rank; give parallel\.pp=1"):
        helper.run_ranks(TARGET, 2, {"pp": 2}, 0.0, False)
