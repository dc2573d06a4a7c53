"""How many micro-batches each stage of a pipeline rank holds at once, under megatron-core's schedules: plain arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from parallel.config import ParallelConfig
from parallel.stages import group_size


def held_at_peak(config: ParallelConfig, rank: int, micro_batches: int, costs: Sequence[int]) -> tuple[int, ...]:
    """Micro-batches held of each of the rank's vpp stages at the moment when they take most, where one costs `costs` [vpp].

    Held means: forward done, backward not. 1F1B holds min(M, pp - rank) of its one stage. With virtual stages the forward passes
    before the first backward one are those of megatron-core's get_pp_rank_microbatches, and then one follows each.
    """
    order = [chunk for chunk, _ in forward_order(config, micro_batches)]
    # a backward pass goes through the stages the other way round
    back = [config.vpp - 1 - chunk for chunk in order]
    warmup = min(len(order), warmup_passes(config, rank, micro_batches))
    held, best, most, total = [0] * config.vpp, (0,) * config.vpp, -1, 0
    for step, chunk in enumerate(order):
        held[chunk] += 1
        total += costs[chunk]
        if total > most:
            most, best = total, tuple(held)
        if step >= warmup:
            done = back[step - warmup]
            held[done] -= 1
            total -= costs[done]
    return best


def warmup_passes(config: ParallelConfig, rank: int, micro_batches: int) -> int:
    """Forward passes of any stage before the one that the first backward pass follows, if there are as many."""
    after = config.pp - rank - 1
    if config.vpp == 1:
        return after
    return 2 * after + (config.vpp - 1) * group_size(config, micro_batches)


def forward_order(config: ParallelConfig, micro_batches: int) -> list[tuple[int, int]]:
    """(which of the rank's stages, which micro-batch) of each forward pass: a group goes through one stage after another."""
    if config.vpp == 1:
        return [(0, number) for number in range(micro_batches)]
    group = group_size(config, micro_batches)
    return [
        (chunk, number)
        for first in range(0, micro_batches, group)
        for chunk in range(config.vpp)
        for number in range(first, min(first + group, micro_batches))
    ]
