"""The simulated pipeline against the closed form of even stages, against lower bounds of uneven ones, and its order of passes."""

from __future__ import annotations

import pytest

from parallel.config import ParallelConfig
from parallel.in_flight import held_at_peak
from parallel.simulate import passes, play
from parallel.stages import bubble


@pytest.mark.parametrize(("pp", "vpp", "micro_batches"), [(1, 1, 3), (4, 1, 8), (8, 1, 3), (4, 2, 8), (4, 3, 12), (8, 2, 64)])
def test_even_stages_wait_as_the_closed_form_says(pp: int, vpp: int, micro_batches: int):
    config = ParallelConfig(pp=pp, vpp=vpp)
    stages = pp * vpp
    step = play(config, micro_batches, [1.0] * stages, [2.0] * stages)
    assert step.bubble == pytest.approx(bubble(config, micro_batches))
    assert step.time == pytest.approx(3 * (micro_batches * vpp + pp - 1))


def test_virtual_stages_wait_less():
    shares = [play(ParallelConfig(pp=4, vpp=v), 8, [4 / v] * 4 * v, [8 / v] * 4 * v).bubble for v in (1, 2, 4)]
    assert shares == sorted(shares, reverse=True) and shares[2] < shares[0] / 2


@pytest.mark.parametrize("vpp", [1, 2])
def test_the_slowest_rank_sets_the_pace(vpp: int):
    config = ParallelConfig(pp=4, vpp=vpp)
    even = play(config, 16, [1.0] * 4 * vpp, [2.0] * 4 * vpp)
    ahead, back = [1.0] * 4 * vpp, [2.0] * 4 * vpp
    ahead[-1], back[-1] = 1.5, 3.0
    uneven = play(config, 16, ahead, back)
    assert uneven.time >= uneven.busy[3] == pytest.approx(even.busy[3] + 16 * 1.5)
    assert uneven.bubble > even.bubble
    assert uneven.time == pytest.approx(even.time + 16 * 1.5, rel=0.05)  # the head is never idle for long


def test_hops_only_delay():
    config = ParallelConfig(pp=4)
    there, far = (play(config, 8, [1.0] * 4, [2.0] * 4, hop) for hop in (0.0, 0.25))
    assert far.busy == there.busy and there.time + 6 * 0.25 <= far.time <= there.time + 0.25 * 2 * 8 * 4


@pytest.mark.parametrize(("pp", "vpp", "micro_batches"), [(4, 1, 8), (4, 2, 10), (2, 3, 4)])
def test_passes_hold_what_the_memory_says(pp: int, vpp: int, micro_batches: int):
    config = ParallelConfig(pp=pp, vpp=vpp)
    for rank in range(pp):
        order = list(passes(config, rank, micro_batches))
        assert len(set(order)) == len(order) == 2 * vpp * micro_batches
        held, most = 0, 0
        for back, stage, number in order:
            assert stage % pp == rank and (not back or order.index((False, stage, number)) < order.index((True, stage, number)))
            held += -1 if back else 1
            most = max(most, held)
        assert most == sum(held_at_peak(config, rank, micro_batches, [1] * vpp))
