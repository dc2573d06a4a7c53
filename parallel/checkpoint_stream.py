"""Writes a checkpoint box by box, for who never holds a whole model: a released one takes neither its size in memory nor one
process.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from parallel import checkpoint_folder as disk
from parallel import checkpoint_index
from parallel.checkpoint_file import CheckedFile
from parallel.checkpoint_folder import METADATA, CheckpointError
from parallel.together import from_first, gather
from parallel.world import World


class Stream:
    """A new checkpoint in the folder `path`, which appears when it is whole. Made on every rank of `world`, all on one file
    system; each writes a file of its own. Use `finish` or `abort`. Raises CheckpointError where `path` exists.
    """

    def __init__(self, path: Path, world: World):
        self.path, self.world = path, world
        self._work = from_first(world, self._begin)
        self._name = f"__{world.rank}_0{DEFAULT_SUFFIX}"  # megatron-core's, and torch's
        self._file = CheckedFile(self._work / self._name)
        self._written: dict[str, tuple[torch.dtype, torch.Size, list[tuple[torch.Size, torch.Size, int, int]]]] = {}

    def write(self, name: str, value: Tensor, shape: Sequence[int] | None = None, offset: Sequence[int] | None = None) -> None:
        """The elements [offset, offset + value.shape) of the tensor `name` of `shape`; a whole one without those two. Each
        element is written once, by any rank, which keeps nothing of it.
        """
        value = value.detach().cpu().contiguous()
        if value.untyped_storage().nbytes() != value.nbytes:
            value = value.clone()  # torch.save writes all of a storage
        corner = torch.Size(offset if offset is not None else [0] * value.dim())
        at, size = self._file.save(value)
        whole = torch.Size(shape if shape is not None else value.shape)
        of = self._written.setdefault(name, (value.dtype, whole, []))
        of[2].append((corner, value.shape, at, size))

    def finish(self, facts: Mapping[str, Any], step: int = 0) -> None:
        """Verifies what is on the disk and makes the folder appear. `facts`: as Saver.save's, rank 0's.

        Raises CheckpointError on every rank, and leaves nothing, where that fails.
        """
        failure: str | None = None
        entry: disk.Entry | None = None
        try:
            with self._file:
                entry = self._file.close()
        except (OSError, CheckpointError) as error:
            failure = str(error)
        ranks = gather(self.world, (self._name, entry, self._written, failure))
        wrong = [f"rank {rank}: {said}" for rank, (*_, said) in enumerate(ranks) if said]
        try:
            from_first(self.world, lambda: self._publish(ranks, wrong, facts, step))
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Leaves nothing behind. To be called on every rank."""
        self._file.__exit__()
        if self.world.rank == 0:
            shutil.rmtree(self._work, ignore_errors=True)

    def _begin(self) -> Path:
        if self.path.exists() or self.path.is_symlink():
            raise CheckpointError(f"{self.path} exists already; give a new folder or remove it")
        return disk.unfinished(self.path)

    def _publish(self, ranks: Sequence[tuple[str, disk.Entry | None, Any, Any]], wrong: list[str], facts: Any, step: int) -> None:
        from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

        if not wrong:
            try:
                work, files = self._work, {name: entry for name, entry, *_ in ranks if entry is not None}
                with (work / METADATA).open("wb") as file:
                    pickle.dump(_index({name: written for name, _, written, _ in ranks}), file)
                save_config(CheckpointingConfig("torch_dist", 1), work)  # by which megatron-core knows the format
                for name in (METADATA, "metadata.json"):
                    disk.flush(work / name)
                    files[name] = disk.entry(work / name)
                checkpoint_index.read(work, files)
                state = {**facts, "layout": disk.layout(self.world), "format": disk.FORMAT, "step": step, "files": files}
                disk.seal(work, state)
                os.rename(work, self.path)
                disk.flush(self.path.parent)
                return
            except (OSError, CheckpointError) as error:
                wrong = [str(error)]
        raise CheckpointError(f"{self.path} could not be written:{disk.listed(wrong)}\nnothing is left there")


def _index(written: Mapping[str, Mapping[str, Any]]) -> Metadata:
    """torch_dist's index of what the files hold."""
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for file, of in written.items():
        for name, (dtype, shape, boxes) in of.items():
            entry = tensors.setdefault(name, TensorStorageMetadata(TensorProperties(dtype=dtype), shape, []))
            for offset, sizes, at, length in boxes:
                entry.chunks.append(ChunkStorageMetadata(offset, sizes))
                places[MetadataIndex(name, offset)] = _StorageInfo(file, at, length)
    return Metadata(tensors, storage_data=places)  # type: ignore[arg-type]
