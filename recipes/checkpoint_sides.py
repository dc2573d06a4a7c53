"""What `k3 bench checkpoint` has each of two ranks do: the same tensors, saved and loaded by three libraries in turns."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import time
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import parallel
import parallel.megatron  # what ranks import later is then imported once for all of them
from parallel import checkpoint
from parallel.boxes import Box
from parallel.config import ParallelConfig

RANKS = 2
# A layer of the state: matrices of this many rows a rank, cut by rows over the ranks, and two norms that all hold alike
ROWS = {"q": 1024, "o": 1024, "gate": 512, "up": 512, "down": 512, "latent_in": 256, "latent_out": 256}
NORMS = ("attention_norm", "norm")
WIDTH = 4096
LAYER = 4 * WIDTH * sum(ROWS.values())  # bytes of float32 a rank, 64 MiB, without the norms
MATMUL = 384  # of the square matrices that the training thread multiplies meanwhile

Work = Callable[[Path], Any]


class State:
    """`layers` times ROWS and NORMS. It is a state provider, and makes of itself what the other libraries take."""

    per_rank = False

    def __init__(self, layers: int):
        self.rank = dist.get_rank()
        own, common = torch.Generator().manual_seed(1 + self.rank), torch.Generator().manual_seed(0)
        names = [f"layers.{layer}" for layer in range(layers)]
        self.cut = {f"{at}.{name}": torch.randn(n, WIDTH, generator=own) for at in names for name, n in ROWS.items()}
        self.alike = {f"{at}.{name}": torch.randn(WIDTH, generator=common) for at in names for name in NORMS}
        self.sums = self._sums()

    def boxes(self) -> Iterator[Box]:
        for name, tensor in self.cut.items():
            yield Box(name, tensor, (RANKS * tensor.shape[0], WIDTH), (self.rank * tensor.shape[0], 0))
        for name, tensor in self.alike.items():
            yield Box.whole(name, tensor, replica=self.rank)

    def loaded(self, anew: int | None = None) -> None:
        """Everything lies where it was filled."""

    def sharded(self) -> dict[str, Any]:
        """As megatron-core takes it."""
        from megatron.core.dist_checkpointing import ShardedTensor

        cut = {n: ShardedTensor.from_rank_offsets(n, t, (0, self.rank, RANKS)) for n, t in self.cut.items()}
        return cut | {n: ShardedTensor.from_rank_offsets(n, t, replica_id=self.rank) for n, t in self.alike.items()}

    def distributed(self) -> dict[str, Any]:
        """As torch.distributed.checkpoint takes it."""
        from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

        mesh = init_device_mesh("cpu", (RANKS,))
        cut = {n: DTensor.from_local(t, mesh, [Shard(0)], run_check=False) for n, t in self.cut.items()}
        return cut | {n: DTensor.from_local(t, mesh, [Replicate()], run_check=False) for n, t in self.alike.items()}

    def clear(self) -> None:
        for tensor in (*self.cut.values(), *self.alike.values()):
            tensor.zero_()

    def check(self, side: str) -> None:
        """Raises RuntimeError unless every tensor holds what it began with."""
        if wrong := [name for name, found in self._sums().items() if found != self.sums[name]]:
            raise RuntimeError(f"{side}: {len(wrong)} tensors are not what was saved, such as {wrong[0]}")

    def _sums(self) -> dict[str, int]:
        return {name: zlib.crc32(memoryview(t.numpy()).cast("B")) for name, t in (self.cut | self.alike).items()}


def on_rank(folder: str, layers: int, rounds: int) -> dict[str, Any]:
    """Seconds of every round by (what, side), which are the same on all ranks; `bytes` of a checkpoint by side, and `threads`."""
    warnings.simplefilter("ignore")  # theirs: that they load without collectives
    logging.getLogger("megatron.core").setLevel(logging.ERROR)  # that its writer is deprecated, which it has chosen itself
    try:
        return _rounds(Path(folder), layers, rounds)
    finally:
        _end_queue()


def _rounds(home: Path, layers: int, rounds: int) -> dict[str, Any]:
    world = parallel.start(ParallelConfig(dp=RANKS), "cpu")
    state = State(layers)
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    sizes: dict[str, int] = {}
    sides: dict[str, tuple[Work, Work]] = {
        "ours": (
            lambda at: checkpoint.save(at, 1, {"state": state}, {}, world),
            lambda at: checkpoint.load(at / "step_1", {"state": state}, world),
        ),
        "megatron": _megatron(state),
        "verified": _megatron(state, verify_integrity=True),
        "torch": _torch(state),
    }
    backgrounds: dict[str, tuple[Work, Callable[[], bool]]] = {
        "ours": _ours_behind(home, state, world),
        "torch": _torch_behind(state),
    }
    for number in range(rounds + 1):  # the first, in which things are imported and made, does not count
        first = number % len(sides)  # another in every round: the disk's own cache is emptiest for the first
        for side in (*list(sides)[first:], *list(sides)[:first]):
            save, load = sides[side]
            at = _fresh(home / f"{side}_{number}")
            taken = {("save", side): _timed(save, at)}
            sizes[side] = sum(file.stat().st_size for file in at.rglob("*") if file.is_file())
            for what in ("load", "disk"):
                if what == "disk":
                    _forget(at)
                state.clear()
                taken[what, side] = _timed(load, at)
                state.check(side)
            _keep(times, taken, number)
        for side, (save, done) in backgrounds.items():
            at = _fresh(home / f"{side}_behind_{number}")
            taken = {("quiet", side): _speed(until=lambda: True, least=300)}
            began = time.perf_counter()
            taken["stall", side] = _timed(save, at)
            state.clear()  # what was saved is what was there
            taken["busy", side] = _speed(until=done)
            dist.barrier()
            taken["total", side] = time.perf_counter() - began
            sides[side][1](at)
            state.check(f"{side}, asynchronous")
            _keep(times, taken, number)
        dist.barrier()
        if state.rank == 0:
            for path in home.iterdir():
                shutil.rmtree(path)
    return {"times": dict(times), "bytes": sizes, "threads": torch.get_num_threads()}


def _megatron(state: State, **options: bool) -> tuple[Work, Work]:
    from megatron.core import dist_checkpointing

    return (
        lambda at: dist_checkpointing.save(state.sharded(), str(at), **options),
        lambda at: dist_checkpointing.load(state.sharded(), str(at), **options),
    )


def _end_queue() -> None:
    """megatron-core's saving has started a process, for a queue, that would outlive its rank."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = None
    gc.collect()


def _torch(state: State) -> tuple[Work, Work]:
    from torch.distributed import checkpoint as theirs

    return (
        lambda at: theirs.save(state.distributed(), checkpoint_id=at),
        lambda at: theirs.load(state.distributed(), checkpoint_id=at),
    )


def _ours_behind(home: Path, state: State, world: Any) -> tuple[Work, Callable[[], bool]]:
    saver = checkpoint.Saver(home, world)

    def save(at: Path) -> None:
        saver.folder = at
        saver.save(1, {"state": state}, {})

    def done() -> bool:
        saver.poll()
        return "checkpoint/seconds" in saver.timings()

    return save, done


def _torch_behind(state: State) -> tuple[Work, Callable[[], bool]]:
    from torch.distributed import checkpoint as theirs

    running: list[Any] = []
    group = dist.new_group(backend="gloo")  # its thread's own, as ours has

    def save(at: Path) -> None:
        running[:] = [theirs.async_save(state.distributed(), checkpoint_id=at, process_group=group)]

    def done() -> bool:
        if running[0].done():
            running[0].result()  # raises what went wrong
            return True
        return False

    return save, done


def _fresh(path: Path) -> Path:
    """A folder that is there on all ranks, with nothing of what came before left to be written."""
    if dist.get_rank() == 0:
        path.mkdir()
    dist.barrier()
    os.sync()
    return path


def _forget(folder: Path) -> None:
    """Takes the files of a folder, which are all flushed, out of the page cache."""
    dist.barrier()
    for file in folder.rglob("*") if dist.get_rank() == 0 else ():
        if file.is_file():
            handle = os.open(file, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)
    dist.barrier()


def _timed(work: Work, at: Path) -> float:
    """Seconds until all ranks are through."""
    dist.barrier()
    began = time.perf_counter()
    work(at)
    dist.barrier()
    return time.perf_counter() - began


def _speed(until: Callable[[], bool], least: int = 1) -> float:
    """Matrix products a second, at least so many, until something is done."""
    one, count, spent = torch.ones(MATMUL, MATMUL), 0, 0.0
    while count < least or not until():
        began = time.perf_counter()
        for _ in range(10):
            one @ one
        spent += time.perf_counter() - began
        count += 10
    return count / spent


def _keep(times: dict[tuple[str, str], list[float]], taken: dict[tuple[str, str], float], number: int) -> None:
    for (what, side), seconds in taken.items():
        if number:
            times[what, side].append(seconds)
        elif what == "stall":
            times["first stall", side].append(seconds)
