"""A step of a pipeline, played through pass by pass: how long it takes, and how long each rank waits. Plain arithmetic.

The order of passes is that of megatron-core's schedules (`parallel/in_flight.py`): 1F1B, or interleaved with virtual stages.
Stages may take different times, as uneven ones and the head do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parallel.config import ParallelConfig
from parallel.in_flight import forward_order, warmup_passes

Pass = tuple[bool, int, int]  # is it a backward one?, the stage, the micro-batch


@dataclass(frozen=True)
class Played:
    """A step, in the unit of the passes' times."""

    time: float
    busy: tuple[float, ...]  # of each pipeline rank

    @property
    def bubble(self) -> float:
        """The share of the step in which the average rank waits."""
        return max(0.0, 1 - sum(self.busy) / (self.time * len(self.busy)))  # not a rounding below none


def play(
    config: ParallelConfig, micro_batches: int, forward: Sequence[float], backward: Sequence[float], hop: float = 0.0
) -> Played:
    """forward, backward [pp * vpp]: the time of a pass of each stage, in the model's order; hop: from one stage to the next.

    A hop delays what waits for it and keeps no rank busy. Raises ParallelError where the interleaved schedule cannot run.
    """
    orders = [list(passes(config, rank, micro_batches)) for rank in range(config.pp)]
    last = config.pp * config.vpp - 1
    ends: dict[Pass, float] = {}
    clock = [0.0] * config.pp
    at = [0] * config.pp
    left = sum(map(len, orders))
    while left:
        before = left
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                one = back, stage, number = order[at[rank]]
                if back:
                    ready = ends.get((True, stage + 1, number)) if stage < last else ends.get((False, stage, number))
                    wait = hop if stage < last else 0.0
                else:
                    ready = ends.get((False, stage - 1, number)) if stage else 0.0
                    wait = hop if stage else 0.0
                if ready is None:
                    break
                clock[rank] = max(clock[rank], ready + wait) + (backward if back else forward)[stage]
                ends[one] = clock[rank]
                at[rank] += 1
                left -= 1
        if left == before:
            raise RuntimeError(f"the passes of {config} wait for each other")  # an order that no schedule has
    work = [f + b for f, b in zip(forward, backward, strict=True)]
    busy = tuple(micro_batches * sum(work[rank :: config.pp]) for rank in range(config.pp))
    return Played(max(clock), busy)


def passes(config: ParallelConfig, rank: int, micro_batches: int) -> Iterator[Pass]:
    """Of one pipeline rank, in order: forward ones to warm up, then one of each kind in turn, then what is left backward."""
    order = forward_order(config, micro_batches)
    # a backward pass goes through the rank's stages the other way round
    ahead = [(False, chunk * config.pp + rank, number) for chunk, number in order]
    back = [(True, (config.vpp - 1 - chunk) * config.pp + rank, number) for chunk, number in order]
    warmup = min(len(order), warmup_passes(config, rank, micro_batches))
    yield from ahead[:warmup]
    for one, other in zip(ahead[warmup:], back):
        yield one
        yield other
    yield from back[len(order) - warmup :]
