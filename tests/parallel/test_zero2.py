"""Pipeline ZeRO-2 against megatron-core's whole gradient buffers, on one, two and four ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel.config import ParallelConfig
from parallel.local import Helper
from parallel.slots import group_sizes
from tests.parallel.zero2_ranks import Case

RANKS = "tests.parallel.zero2_ranks:"
LAYOUTS = {  # replicas of dense parameters and of experts
    "1 and 1": ParallelConfig(dp=1),
    "2 and 1": ParallelConfig(dp=2, ep=2),
    "4 and 2": ParallelConfig(dp=4, ep=2),
    "context": ParallelConfig(cp=2, dp=2),
}
EXACT = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2e-6}


def run(helper: Helper, what: str, layout: str, *args: Any) -> list[Any]:
    config = LAYOUTS[layout]
    return helper.run_ranks(RANKS + what, config.cp * (config.dp or 1), config, *args, timeout=60)


def check(want: dict[str, Any], got: dict[str, Any], case: Case, times: int = 1) -> None:
    wide = torch.float64 if case.dtype == torch.float64 else torch.float32
    assert want.keys() == got.keys() and len(want) == 6 * case.chunks
    for name, part in want.items():
        assert got[name]["parts"] == part["parts"], name
        a, b = got[name]["gradient"], part["gradient"] * times
        assert a.dtype == wide and a.shape == b.shape, name
        assert (a - b).norm() <= EXACT[case.dtype] * b.norm(), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_zero_1(helper: Helper, layout: str) -> None:
    cases = [Case(dtype, micro_batches=number) for dtype in EXACT for number in (4, 5)]
    for rank in run(helper, "compare", layout, cases):
        for case, facts in zip(cases, rank):
            check(facts["want"], facts["got"], case)
            check(facts["want"], facts["twice"], case, times=2)
            if layout != "1 and 1":  # an edge of the cut falls into a matrix
                assert any(
                    0 < stop - start < 35 * 11 for name in ("up", "down") for start, stop in facts["got"][f"2.{name}"]["parts"]
                )


@pytest.mark.parametrize("layout", ["1 and 1", "4 and 2"])
def test_offloaded_gradients(helper: Helper, layout: str) -> None:
    cases = [Case(micro_batches=5, offload=True, landing=landing) for landing in (False, True)]
    for rank in run(helper, "compare", layout, cases):
        for case, facts in zip(cases, rank):
            check(facts["want"], facts["got"], case)
            check(facts["want"], facts["twice"], case, times=2)
            assert facts["moved"] is case.landing
            assert {part["device"] for part in facts["got"].values()} == {"cpu"}


@pytest.mark.parametrize("offload", [False, True])
def test_the_optimizer_makes_the_same_weights(helper: Helper, offload: bool) -> None:
    ranks = run(helper, "trained", "4 and 2", Case(offload=offload))
    for facts in ranks:
        for name, weight in facts["want"].items():
            torch.testing.assert_close(facts["got"][name], weight, rtol=1e-12, atol=1e-14)
            if "experts" not in name:
                assert torch.equal(facts["got"][name], ranks[0]["got"][name]), name


@pytest.mark.parametrize("layout, chunks", [("2 and 1", [6]), ("4 and 2", [3, 6])])
def test_live_gradients_are_two_chunks_and_the_shards(helper: Helper, layout: str, chunks: list[int]) -> None:
    cases = [Case(dtype, chunks=number, micro_batches=5) for dtype in (torch.float64, torch.bfloat16) for number in chunks]
    for rank in run(helper, "measure", layout, cases):
        for case, facts in zip(cases, rank):
            bound = facts["bound"]
            assert len(facts["seen"]) == 5 * case.chunks and not facts["left"]
            assert facts["slots"] == 2 * bound["largest"] and facts["shards"] == bound["shards"]
            assert max(facts["seen"]) <= 2 * bound["largest"] + bound["shards"] < bound["all"]
            assert min(facts["seen"]) == facts["slots"] + facts["shards"]


def test_a_reduction_runs_during_the_next_chunk_s_passes(helper: Helper) -> None:
    """Turn t is reduced while turn t + 1 fills the other slot, and is waited for when turn t + 2 takes its own."""
    case = Case(micro_batches=5)
    turns = [size for size in group_sizes(5, case.group) for _ in range(case.chunks)]
    first = [sum(turns[:t]) for t in range(len(turns) + 1)]  # pass that each turn begins with
    for log in run(helper, "overlap", "4 and 2", case):
        at = {entry: place for place, entry in enumerate(log)}
        number = 0
        for turn in range(len(turns)):
            buckets = 3 if turn % case.chunks == case.chunks - 1 else 2  # of chunk 0 the shared table, the rest, the experts
            for n in range(number, number + buckets):
                assert at["begin", first[turn + 1] - 1] < at["start", n] < at["end", first[turn + 1] - 1]
                if turn + 1 < len(turns):
                    assert at["end", first[turn + 2] - 1] < at["wait", n]
                if turn + 2 < len(turns):
                    assert at["begin", first[turn + 2]] < at["wait", n] < at["end", first[turn + 2]]
            number += buckets
        assert sum(what == "wait" for what, _ in log) == sum(what == "start" for what, _ in log) == number


@pytest.mark.parametrize("landing", [False, True])
def test_no_step_follows_one_that_failed(helper: Helper, landing: bool) -> None:
    case = Case(offload=landing, landing=landing)
    for rank in run(helper, "interrupted", "4 and 2", case, [0, 3, 9]):
        for facts in rank:
            assert facts["errors"][0] == "on purpose" and "did not come" in facts["errors"][1]


def test_other_passes_than_announced_are_named(helper: Helper) -> None:
    (said,) = run(helper, "miscounted", "1 and 1", Case())
    assert said["right"] == "nothing" and said["left"][0] == 0
    assert said["one short"].startswith("chunk 0: 6 gradients") and "1 of table" in said["one short"]
    assert said["a group short"].startswith("chunk 0: 12 gradients") and "0 more groups" in said["a group short"]
    assert "more gradients than there are micro-batches" in said["one more"]
    assert said["a larger group"].startswith("chunk 1: its backward pass began before the turn of another was over")
    assert "chunk 2: 12 gradients" in said["a larger group"]
    assert "after begin_step" in said["not begun"]
    assert "chunk 0: 2 gradients" in said["a parameter without"] and "2 of one" in said["a parameter without"]


def test_group_sizes_are_those_of_megatron_core_s_table() -> None:
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    for micro_batches in range(1, 12):
        for group in range(1, micro_batches + 1):
            table = get_schedule_table(micro_batches, 2, group)
            turns = [0]
            for (_, before), (_, chunk) in zip([(0, 0), *table], table):
                if chunk != before:
                    turns.append(0)
                turns[-1] += 1
            assert turns[::2] == turns[1::2] == group_sizes(micro_batches, group), (micro_batches, group)
