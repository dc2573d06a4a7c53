"""Sizes of the parallel axes, as the user types them (`parallel.tp=2`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd


@dataclass
class ParallelConfig:
    tp: int = 1  # tensor
    sp: bool | None = None  # sequence parallel inside the tensor group; null: on where tp > 1
    ep: int = 1  # expert, over the ranks of tp * cp * dp
    pp: int = 1  # pipeline
    vpp: int = 1  # virtual stages per pipeline rank
    split: list[int] | None = None  # decoder layers of each of the pp * vpp stages, in the model's order; null: evenly
    group: int | None = None  # micro-batches that pass a virtual stage in a row; null: pp, more where the accumulation needs it
    overlap_warmup: bool = False  # virtual stages send and receive while they compute; true: also in warm-up and flush
    cp: int = 1  # context: contiguous shards of the sequence
    dp: int | None = None  # data; null: what the processes leave, and at least what ep needs
    zero: int = 1  # over data and context ranks 1 cuts the optimizer, 2 gradients too (with virtual stages); 0: nothing
    offload_gradients: bool = False  # with zero=2: the reduced gradients lie in CPU memory
    overlap: bool = True  # reduce gradients while the backward pass still runs
    bucket: int | None = None  # parameters reduced together; null: megatron-core's choice


class ParallelError(ValueError):
    """A parallel layout that cannot run; the message names the size, the value and the fix."""


def data_parallel_size(config: ParallelConfig, processes: int | None = None) -> int:
    """`parallel.dp`; where it is null, what `processes` leave after the other axes, or, with None, the least value for which ep
    divides tp * cp * dp.
    """
    if config.dp is not None:
        return config.dp
    inner = config.tp * config.cp
    if processes is not None and processes % (inner * config.pp) == 0:
        return processes // (inner * config.pp)
    return config.ep // gcd(config.ep, inner)


def world_size(config: ParallelConfig, processes: int | None = None) -> int:
    """How many processes the layout takes."""
    return config.tp * config.pp * config.cp * data_parallel_size(config, processes)


def sequence_parallel(config: ParallelConfig) -> bool:
    return config.tp > 1 if config.sp is None else config.sp


def check_sizes(config: ParallelConfig) -> None:
    """Raises ParallelError, all reasons in one message, one a line, for a layout that cannot run whatever the model."""
    wrong = []
    for axis in ("tp", "ep", "pp", "vpp", "cp", "dp", "group", "bucket"):
        size = getattr(config, axis)
        if size is not None and size < 1:
            wrong.append(f"parallel.{axis}={size}: must be at least 1")
    wrong += _pipeline(config)
    if config.zero not in (0, 1, 2):
        wrong.append(f"parallel.zero={config.zero}: give 0, 1 or 2")
    if config.sp and config.tp == 1:
        wrong.append("parallel.sp=true: sequence parallelism needs parallel.tp of at least 2; leave it out")
    if not wrong and config.dp is not None and (ranks := config.tp * config.cp * config.dp) % config.ep:
        wrong.append(
            f"parallel.ep={config.ep}: must divide tp * cp * dp = {config.tp} * {config.cp} * {config.dp} = {ranks}, "
            f"the ranks that experts are spread over; give parallel.dp={config.ep // gcd(config.ep, config.tp * config.cp)}"
        )
    if wrong:
        raise ParallelError("\n".join(wrong))


def _pipeline(config: ParallelConfig) -> Iterator[str]:
    virtual = config.vpp > 1
    if virtual and config.pp == 1:
        yield f"parallel.vpp={config.vpp}: virtual stages need parallel.pp of at least 2; leave it out"
    if config.overlap_warmup and not virtual:
        yield "parallel.overlap_warmup=true: only virtual stages overlap; give parallel.vpp of at least 2, or leave it out"
    if config.group is not None and not virtual:
        yield f"parallel.group={config.group}: has a meaning between virtual stages alone; leave it out"
    if config.zero == 2 and not virtual:
        yield (
            "parallel.zero=2: with one stage a rank, its two buffers would be more than the one of parallel.zero=1; give "
            "parallel.pp and parallel.vpp of at least 2, or parallel.zero=1"
        )
    if config.zero == 2 and virtual and config.dp is not None and config.dp * config.cp == 1:
        yield "parallel.zero=2: cuts gradients over data and context ranks, and there is one; give parallel.dp=2, or leave it out"
    if config.zero == 2 and config.bucket is not None:
        yield f"parallel.bucket={config.bucket}: parallel.zero=2 reduces the gradients of a stage together; leave it out"
    if config.zero == 2 and not config.overlap:
        yield "parallel.overlap=false: parallel.zero=2 always reduces while the next stage computes; leave it out"
    if config.offload_gradients and config.zero != 2:
        yield f"parallel.offload_gradients=true: has no effect with parallel.zero={config.zero}; give parallel.zero=2"
