"""What the ranks of a run decide together: rank 0's choices become everyone's, and a failure is told once."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from parallel.world import World


def from_first[T](world: World | None, work: Callable[[], T]) -> T:
    """What `work` returns on rank 0, on every rank; what it raises there is raised on every rank. Both must be picklable."""
    if world is None or world.size == 1:
        return work()
    answer: list[tuple[T | None, Exception | None]] = [(None, None)]
    if world.rank == 0:
        try:
            answer = [(work(), None)]
        except Exception as error:
            _failed_first()  # before the others hear of it and fail, too
            answer = [(None, error)]
    dist.broadcast_object_list(answer, src=0)
    value, failure = answer[0]
    if failure is not None:
        raise failure
    return value  # type: ignore[return-value]


def gather[T](world: World | None, value: T) -> list[T]:
    """Every rank's value, on every rank, in the order of ranks."""
    if world is None or world.size == 1:
        return [value]
    values: list[T | None] = [None] * world.size
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]


def over_stages[T](world: World, own: dict[str, T]) -> dict[str, T]:
    """The entries of all pipeline ranks' dictionaries, sorted by name (layers.2 before layers.10).

    Every rank must call it.
    """
    group = world.groups.pp
    if group.size() == 1:
        return own
    every: list[dict[str, T] | None] = [None] * group.size()
    dist.all_gather_object(every, own, group=group)
    merged = {key: value for one in every if one is not None for key, value in one.items()}
    return {name: merged[name] for name in sorted(merged, key=by_number)}


def by_number(name: str) -> list[int | str]:
    """Sorts dotted names with numbers by value: layers.2 before layers.10."""
    return [int(part) if part.isdigit() else part for part in name.split(".")]


@contextmanager
def told_once(world: World, alike: tuple[type[Exception], ...]) -> Iterator[None]:
    """Around what the ranks do together: of a failure the first rank alone prints its traceback, and none waits for another.

    Exceptions of the types `alike`, which all ranks raise together, and what the machine refuses rank 0, pass. Any other ends
    this process with exit code 1: unwinding would wait for ranks that are no more. A single process is left as it is.
    """
    try:
        yield
    except Exception as error:
        if world.size == 1:
            raise
        first = _failed_first()
        if isinstance(error, alike) or (isinstance(error, OSError) and world.rank == 0):
            raise
        if first:
            print(f"rank {world.rank} of {world.size} failed:\n{traceback.format_exc()}", file=sys.stderr, end="")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


_first: bool | None = None


def _failed_first() -> bool:
    """Whether no rank failed before this one. The others mostly fail because the first one's connections closed."""
    global _first
    if _first is None:
        try:
            _first = dist.distributed_c10d._get_default_store().add("failed", 1) == 1
        except RuntimeError:  # the store has gone with the process that held it
            _first = True
    return _first
