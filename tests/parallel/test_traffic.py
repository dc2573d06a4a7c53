"""The traffic counter against sizes worked out by hand, on four ranks: two tensor ranks x two data ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from parallel.local import Helper

B = 24  # bytes of the tensors in traffic_targets.each_collective


@pytest.fixture(scope="module")
def helper() -> Iterator[Helper]:
    with Helper() as running:
        yield running


def test_every_collective_by_axis(helper: Helper) -> None:
    results = helper.run_ranks("tests.parallel.traffic_targets:each_collective", 4)
    for rank, (forward, _) in enumerate(results):
        tensor_rank, data_rank = rank % 2, rank // 2
        # half of the even exchange, and the uneven one: five of six rows leave the first rank, one the second
        all_to_all = B // 2 + (20 if tensor_rank == 0 else 4)
        assert forward["tensor"] == {"all-reduce": B, "all-gather": B, "reduce-scatter": B // 2, "all-to-all": all_to_all}
        root = {"all-gather": B, "broadcast": B, "reduce": B, "scatter": B, "send": B}
        assert forward["data"] == (root if data_rank == 0 else {"all-gather": B, "gather": B})
        assert forward["all"] == {"all-reduce": 2 * B * 3 // 4}
        assert set(forward) == {"tensor", "data", "all"}


def test_backward_passes_are_counted(helper: Helper) -> None:
    for _, backward in helper.run_ranks("tests.parallel.traffic_targets:each_collective", 4):
        assert backward == {"tensor": {"all-reduce": B}}
