"""Writes checkpoints in the background: the caller waits for the copy alone, a thread does the rest.

A thread, not megatron-core's forked process: a process that computes with threads may not be forked safely, each rank would start
another interpreter for the queue of results, and a CPU rank's tensors would have to be copied before the fork all the same.
megatron-core plans what each rank writes; the files are written here, because their checksums are taken on the way to the disk.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import checkpoint_folder as disk
from parallel.boxes import Box, StateProvider, key, sharded
from parallel.checkpoint_file import CheckedFile
from parallel.checkpoint_folder import METADATA, CheckpointError
from parallel.together import from_first, gather
from parallel.world import World

type Copies = dict[Any, Tensor]  # by torch_dist's index of a box: its tensor's name and offset


class Saver:
    """Writes the checkpoints of one run into `folder`, one at a time. Made on every rank of `world`, which call it together.

    keep_last > 0 removes all but that many of the newest checkpoints after each one, except every `keep_every`-th step's.
    asynchronous=False: `save` returns when the checkpoint is there. Otherwise `save` copies, and the copies, as many bytes of CPU
    memory as this rank writes, stay until `close` for the saves that follow: getting fresh memory from the system takes several
    times as long as the copying.
    """

    def __init__(self, folder: Path, world: World, *, keep_last: int = 0, keep_every: int = 0, asynchronous: bool = True):
        self.folder, self.world, self.asynchronous = folder, world, asynchronous
        self.keep_last, self.keep_every = keep_last, keep_every
        # the thread's own: collectives of one group must not be called from two threads
        self._group = dist.new_group(backend="gloo") if world.size > 1 else None
        self._running: _Running | None = None
        self._timings: dict[str, float] = {}
        self._copies: Copies | None = {} if asynchronous else None

    def save(self, step: int, providers: Mapping[str, StateProvider], facts: Mapping[str, Any]) -> Path:
        """Copies everything, and has `folder/step_<step>` written and `folder/latest` moved; returns the path. `facts`, rank 0's,
        is what else a resume needs, as JSON. A checkpoint of this very step to which `latest` already points is left as it is.

        Waits for the one before. Raises CheckpointError, on all ranks, where that has failed or nothing can be written.
        """
        began = time.perf_counter()
        self.wait()
        target = self.folder / f"step_{step}"
        work = from_first(self.world, lambda: disk.begin(self.folder, target, self.keep_last, self.keep_every))
        if work is None:
            return target
        boxes: dict[str, list[Box]] = defaultdict(list)
        for name, provider in providers.items():
            for box in provider.boxes():
                if (box.replica == 0 or provider.per_rank) and box.tensor.numel():
                    boxes[key(name, provider, box.name, self.world.rank)].append(box)
        writer, index = _plan(work, boxes, self._copies)
        state = {**facts, "layout": disk.layout(self.world), "format": disk.FORMAT, "step": step}
        self._running = _Running(self, target, writer, index, state, began)
        if self.asynchronous:
            self._running.start()
            self._timings["checkpoint/stall_seconds"] = time.perf_counter() - began
        else:
            self._running.run()
            self._finish(self._running)
            self._timings["checkpoint/stall_seconds"] = time.perf_counter() - began
        return target

    def poll(self) -> None:
        """Raises CheckpointError, on all ranks at the same call, where writing has failed. To be called at every step."""
        if self._running is not None and all(gather(self.world, not self._running.is_alive())):
            self._finish(self._running)

    def wait(self) -> None:
        """Returns when nothing is being written any more. Raises as `poll`."""
        if self._running is not None:
            self._running.join()
            self._finish(self._running)

    def close(self) -> str | None:
        """Waits, too, but asks no other rank and raises nothing, for the way out of an error: returns what has failed."""
        running, self._running = self._running, None
        if running is not None:
            running.join()
        if self._copies is not None:
            self._copies.clear()
        return None if running is None else running.failure

    def timings(self) -> dict[str, float]:
        """What was measured since the last call: `checkpoint/stall_seconds` that training waited for a save, `checkpoint/seconds`
        from its beginning until `latest` had moved.
        """
        out, self._timings = self._timings, {}
        return out

    def _finish(self, running: _Running) -> None:
        self._running = None
        if running.failure is not None:
            raise CheckpointError(running.failure)
        self._timings["checkpoint/seconds"] = running.seconds


class _Running(threading.Thread):
    """The writing of one checkpoint. `failure`, when it has ended, is the same on all ranks."""

    def __init__(self, saver: Saver, target: Path, writer: Any, index: Any, state: dict[str, Any], began: float):
        super().__init__(name=f"writes {target.name}", daemon=True)
        self.saver, self.target, self.writer, self.index, self.state, self.began = saver, target, writer, index, state, began
        self.failure: str | None = "the process ended while it wrote"
        self.seconds = 0.0

    def run(self) -> None:
        world, group = self.saver.world, self.saver._group
        mine = self._try(self.writer.write)
        every = [mine]
        outcome: list[str | None] = [None]
        try:
            if group is not None:
                every = [None] * world.size  # type: ignore[list-item]
                dist.gather_object(mine, every if world.rank == 0 else None, dst=0, group=group)
            if world.rank == 0:
                wrong = [f"rank {rank}: {failure}" for rank, (_, failure) in enumerate(every) if failure]
                if not wrong:
                    _, failure = self._try(lambda: self._publish([done for done, _ in every]))
                    wrong = [failure] if failure else []
                if wrong:
                    shutil.rmtree(Path(self.writer.path), ignore_errors=True)
                    outcome = [disk.unwritten(self.target, wrong)]
            if group is not None:
                dist.broadcast_object_list(outcome, src=0, group=group)
        except Exception as error:  # a rank is gone: the others learn of that in their own collectives, too
            outcome = [f"{self.target} was not finished: {error}"]
        self.failure = outcome[0]
        self.seconds = time.perf_counter() - self.began
        self.writer = self.index = None

    def _try(self, work: Any) -> tuple[Any, str | None]:
        try:
            return work(), None
        except (OSError, CheckpointError) as error:
            return None, str(error)
        except Exception as error:  # nobody above catches what a thread raises
            return None, f"{type(error).__name__}: {error}"

    def _publish(self, written: list[tuple[list[Any], dict[str, Any]]]) -> None:
        from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

        from parallel import checkpoint_index

        work = Path(self.writer.path)
        self.index.__dict__.pop("all_local_plans", None)  # megatron-core's: every rank's plan again, for a reuse we do not make
        self.writer.finish(self.index, [results for results, _ in written])
        save_config(CheckpointingConfig("torch_dist", 1), work)  # by which megatron-core knows the format
        disk.flush(work / "metadata.json")
        files = {name: entry for _, entries in written for name, entry in entries.items()}
        files |= {name: disk.entry(work / name) for name in (METADATA, "metadata.json")}
        checkpoint_index.read(work, files)
        disk.publish(work, self.target, self.state | {"files": files}, self.saver.keep_last, self.saver.keep_every)


def _plan(work: Path, boxes: Mapping[str, list[Box]], copies: Copies | None) -> tuple[Any, Any]:
    """(the writer of this rank's file; on rank 0 the index of all ranks' boxes). The writer has copies of the tensors, which are
    put into `copies` over those of the save before, unless that is None.
    """
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
    from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
    from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
    from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
    from torch.distributed.checkpoint.storage import WriteResult

    class Writer(FileSystemWriterAsync):
        items: list[tuple[Any, Tensor]]
        name: str

        def prepare_write_data(self, plan: Any, planner: Any) -> None:
            self.name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
            tensors = {item.index: planner.resolve_data(item) for item in plan.items}
            alone = {index: _alone(tensor) for index, tensor in tensors.items()} if copies is None else _copied(tensors, copies)
            self.items = [(item, alone[item.index]) for item in plan.items]

        def write(self) -> tuple[list[Any], dict[str, Any]]:
            """Writes this rank's file, flushes and reads it back; what the index and state.json say of it."""
            if not self.items:
                return [], {}
            results = []
            with CheckedFile(Path(self.path) / self.name) as file:
                for item, tensor in self.items:
                    at, size = file.save(tensor)
                    results.append(WriteResult(item.index, size, _StorageInfo(self.name, at, size)))
                return results, {self.name: file.close()}

    writer = Writer(work)
    planned = save_state_dict_async_plan(sharded(boxes), writer, None, planner=MCoreSavePlanner(flatten_state_dict=False))
    return writer, planned[0][1]


def _alone(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous, and alone in its storage (torch.save writes all of that)."""
    own = tensor.detach().to("cpu").contiguous()
    return own if own.untyped_storage().nbytes() == own.nbytes else own.clone()


def _copied(tensors: Mapping[Any, Tensor], copies: Copies) -> Copies:
    """Copies like `_alone`, in the memory of `copies` where those are alike; what is no longer needed of it goes."""
    for index in copies.keys() - tensors.keys():
        del copies[index]
    for index, tensor in tensors.items():
        old = copies.get(index)
        if old is None or (old.shape, old.dtype) != (tensor.shape, tensor.dtype):
            copies[index] = torch.empty(tensor.shape, dtype=tensor.dtype)
        copies[index].copy_(tensor.detach())
    return copies
