"""Sizes of the parallel axes, as the user types them (`parallel.tp=2`)."""

from __future__ import annotations

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
    overlap_p2p: bool | None = None  # send and receive while computing; null: with virtual stages, which alone can
    overlap_warmup: bool = False  # with overlap_p2p: also while the pipeline fills and drains
    cp: int = 1  # context: contiguous shards of the sequence
    dp: int | None = None  # data; null: what the processes leave, and at least what ep needs
    zero: int = 1  # over data and context ranks 1 cuts the optimizer's state and work, 2 gradients too (virtual stages); 0: none
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
    for axis in ("tp", "ep", "pp", "vpp", "cp", "dp", "bucket"):
        size = getattr(config, axis)
        if size is not None and size < 1:
            wrong.append(f"parallel.{axis}={size}: must be at least 1")
    for axis in ("pp", "vpp"):
        if getattr(config, axis) > 1:
            wrong.append(f"parallel.{axis}={getattr(config, axis)}: pipelines do not work yet; give parallel.{axis}=1")
    if config.sp and config.tp == 1:
        wrong.append("parallel.sp=true: sequence parallelism needs parallel.tp of at least 2; leave it out")
    if not wrong and config.dp is not None and (ranks := config.tp * config.cp * config.dp) % config.ep:
        wrong.append(
            f"parallel.ep={config.ep}: must divide tp * cp * dp = {config.tp} * {config.cp} * {config.dp} = {ranks}, "
            f"the ranks that experts are spread over; give parallel.dp={config.ep // gcd(config.ep, config.tp * config.cp)}"
        )
    if wrong:
        raise ParallelError("\n".join(wrong))
