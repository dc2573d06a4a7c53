"""Micro-batches in flight, against the counts that megatron-core's schedules start from."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from parallel.config import ParallelConfig
from parallel.in_flight import held_at_peak, warmup_passes
from parallel.stages import group_size


@pytest.mark.parametrize(("pp", "vpp", "micro_batches"), [(2, 1, 4), (4, 1, 2), (2, 2, 4), (4, 3, 8), (4, 2, 5), (3, 2, 10)])
def test_warmup_is_that_of_megatron_core(pp: int, vpp: int, micro_batches: int):
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches

    import parallel.megatron  # noqa: F401 - the CPU backend first

    layout = ParallelConfig(pp=pp, vpp=vpp)
    for rank in range(pp):
        group = SimpleNamespace(size=lambda: pp, rank=lambda rank=rank: rank)
        place = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None)
        stretch = group_size(layout, micro_batches) if vpp > 1 else None
        total, _, warmup, _ = get_pp_rank_microbatches(micro_batches, vpp, stretch, p2p_communicator=place)
        assert min(total, warmup_passes(layout, rank, micro_batches)) == warmup


def test_one_forward_one_backward_holds_as_many_as_ranks_follow():
    layout = ParallelConfig(pp=4)
    assert [held_at_peak(layout, rank, 8, [1]) for rank in range(4)] == [(4,), (3,), (2,), (1,)]
    assert [held_at_peak(layout, rank, 2, [1]) for rank in range(4)] == [(2,), (2,), (2,), (1,)]
    assert held_at_peak(ParallelConfig(), 0, 8, [1]) == (1,)


def test_virtual_stages_hold_what_lies_between_their_passes():
    layout = ParallelConfig(pp=2, vpp=2)
    # rank 0 before its first backward pass: 2 + 2 forward ones, and the one that precedes it
    assert held_at_peak(layout, 0, 8, [1, 1]) == (3, 2)
    assert held_at_peak(layout, 1, 8, [1, 1]) == (2, 1)
    # the moment that counts is the one where the costly stage holds most
    assert held_at_peak(layout, 0, 8, [1, 100])[1] == 2
    assert sum(held_at_peak(layout, 0, 2, [1, 1])) == 4  # too few for any backward pass to come in between
