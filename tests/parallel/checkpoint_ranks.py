"""What tests/parallel/test_checkpoint.py has each of several ranks do."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import parallel
import parallel.megatron  # what ranks import later is then imported once for all of them
from parallel import checkpoint, checkpoint_file
from parallel.boxes import Box
from parallel.checkpoint import CheckpointError
from parallel.config import ParallelConfig


class Bag:
    """Tensors that all ranks hold alike, or with `per_rank` each its own."""

    def __init__(self, *, per_rank: bool = False, **tensors: Tensor):
        self.per_rank, self.tensors, self.anew = per_rank, tensors, "not loaded"

    def boxes(self) -> Iterator[Box]:
        rank = torch.distributed.get_rank()
        yield from (Box.whole(name, tensor, rank) for name, tensor in self.tensors.items())

    def loaded(self, anew: int | None = None) -> None:
        self.anew = anew


class Rows:
    """A matrix of which each rank holds `counts[rank]` rows, an uneven cut."""

    per_rank = False

    def __init__(self, whole: Tensor, counts: list[int]):
        first = sum(counts[: torch.distributed.get_rank()])
        self.first, self.whole = first, whole
        self.mine = whole[first : first + counts[torch.distributed.get_rank()]].clone()

    def boxes(self) -> Iterator[Box]:
        yield Box("rows", self.mine, tuple(self.whole.shape), (self.first, 0))

    def loaded(self, anew: int | None = None) -> None:
        pass


def save(folder: str, damage: str = "") -> dict[str, Any]:
    """Each rank saves ten times its number and its rows, and loads both back, the rows cut otherwise: what it got."""
    world = parallel.start(ParallelConfig(dp=2))
    whole = torch.arange(35.0).view(7, 5)
    mine = Bag(per_rank=True, x=torch.full((300,), 10.0 * world.rank))
    if damage == "disk" and world.rank == 1:
        checkpoint_file.os.fsync = full
    stored = {"bag": mine, "rows": Rows(whole, [5, 2])}
    saver = checkpoint.Saver(Path(folder), world, asynchronous=damage != "disk")
    try:
        path = saver.save(3, stored, {"position": 3 + world.rank})
        saver.wait()
    except CheckpointError as error:
        return {"failure": str(error)}
    if damage == "file" and world.rank == 1:
        content = bytearray((path / "__1_0.distcp").read_bytes())
        content[-9] ^= 1
        (path / "__1_0.distcp").write_bytes(content)
    torch.distributed.barrier()
    other, rows = Bag(per_rank=True, x=torch.zeros(300)), Rows(torch.zeros(7, 5), [1, 6])
    facts, failure = None, None
    try:
        facts = checkpoint.load(path, {"bag": other, "rows": rows}, world)
    except CheckpointError as error:
        failure = str(error)
    return {"got": other.tensors["x"][0].item(), "facts": facts, "failure": failure, "rows": rows.mine, "anew": other.anew}


def full(handle: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def fails_in_the_background(folder: str) -> list[Any]:
    """One good checkpoint; then rank 1's disk is full: what each call of the saver said, on this rank."""
    world = parallel.start(ParallelConfig(dp=2))
    bag = Bag(per_rank=True, x=torch.ones(10))  # else one rank would write for both
    saver = checkpoint.Saver(Path(folder), world)
    saver.save(1, {"bag": bag}, {})
    saver.wait()
    if world.rank == 1:
        checkpoint_file.os.fsync = full
    said: list[Any] = []
    saver.save(2, {"bag": bag}, {})
    until = time.monotonic() + 60
    while not said and time.monotonic() < until:
        try:
            saver.poll()
        except CheckpointError as error:
            said.append(str(error))
    saver.poll()
    return said


def load(folder: str, config: ParallelConfig) -> dict[str, Any]:
    """Loads what `save` wrote under another layout."""
    world = parallel.start(config)
    other, rows = Bag(per_rank=True, x=torch.zeros(300)), Rows(torch.zeros(7, 5), [2, 2, 3][: world.size])
    checkpoint.load(Path(folder), {"bag": other, "rows": rows}, world)
    return {"got": other.tensors["x"][0].item(), "rows": rows.mine, "anew": other.anew}
