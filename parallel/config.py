"""Sizes of the parallel axes, as the user types them (`parallel.tp=2`)."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd


@dataclass
class ParallelConfig:
    tp: int = 1  # tensor
    sp: bool | None = None  # sequence parallel inside the tensor group; null: on where tp > 1
    ep: int = 1  # expert
    pp: int = 1  # pipeline
    vpp: int = 1  # virtual stages per pipeline rank
    cp: int = 1  # context
    dp: int | None = None  # data; null: the least value for which ep divides tp * cp * dp


class ParallelError(ValueError):
    """A parallel layout that cannot run; the message names the size, the value and the fix."""


def data_parallel_size(config: ParallelConfig) -> int:
    """`parallel.dp`, or the least value for which ep divides tp * cp * dp where it is null."""
    if config.dp is not None:
        return config.dp
    return config.ep // gcd(config.ep, config.tp * config.cp)


def check_sizes(config: ParallelConfig) -> None:
    """Raises ParallelError, all reasons in one message, one a line, for a layout that cannot run."""
    wrong = []
    for axis in ("tp", "ep", "pp", "vpp", "cp", "dp"):
        size = getattr(config, axis)
        if size is not None and size < 1:
            wrong.append(f"parallel.{axis}={size}: must be at least 1")
        elif size is not None and size > 1:
            wrong.append(f"parallel.{axis}={size}: only 1 works so far; leave it out (layouts over several processes come next)")
    if config.sp and config.tp == 1:
        wrong.append("parallel.sp=true: sequence parallelism needs parallel.tp of at least 2; leave it out")
    if wrong:
        raise ParallelError("\n".join(wrong))
