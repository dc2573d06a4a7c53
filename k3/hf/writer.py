"""Streams tensors into a published folder, which appears only when it is whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from k3.hf.format import CONFIG, INDEX, NAMES, SINGLE, CheckpointError, Entry, header, layout, some
from parallel.checkpoint_folder import flush, unfinished


class Writer:
    """Writes the planned tensors, in any order, to the new folder `path`: no more than the one at hand is in memory.

    Tensors fill files of at most `shard_bytes` in the order of the plan (a larger tensor has a file of its own); one file needs
    no index. Use `finish` or `abort`. Raises CheckpointError where `path` exists already.
    """

    def __init__(self, path: Path, plan: Sequence[Entry], config_text: str, shard_bytes: int):
        if path.exists() or path.is_symlink():
            raise CheckpointError(f"{path} exists already; give a new folder or remove it")
        if shard_bytes < 1:
            raise CheckpointError(f"shard_bytes={shard_bytes}: give at least 1")
        seen: set[str] = set()
        if twice := [e.name for e in plan if e.name in seen or seen.add(e.name)]:  # type: ignore[func-returns-value]
            raise CheckpointError(f"{path}: planned twice: {some(twice)}")
        self.path = path
        self._places: dict[str, tuple[Entry, str, int]] = {}  # entry, file, position
        self._open: dict[str, BinaryIO] = {}
        self._left: dict[str, int] = {}  # tensors still to come, by file
        shards = _spread(plan, shard_bytes)
        self._building = unfinished(path)
        try:
            (self._building / CONFIG).write_text(config_text)
            where: dict[str, str] = {}
            for number, entries in enumerate(shards, 1):
                file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
                placed = layout(entries)
                first = header(placed)
                self._left[file] = len(entries)
                self._places |= {entry.name: (entry, file, len(first) + start) for entry, start in placed}
                where |= {entry.name: file for entry in entries}
                with (self._building / file).open("wb") as stream:
                    stream.write(first)
            if len(shards) > 1:
                document = {"metadata": {"total_size": sum(e.nbytes for e in plan)}, "weight_map": where}
                (self._building / INDEX).write_text(json.dumps(document, indent=1) + "\n")
        except BaseException:
            self.abort()
            raise

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes a planned tensor, once. Raises CheckpointError where it is not planned so, or the disk refuses."""
        entry, file, position = self._places.pop(name, (None, "", 0))
        if entry is None or NAMES.get(tensor.dtype) != entry.dtype or tuple(tensor.shape) != entry.shape:
            planned = "not planned, or written already" if entry is None else f"planned as {entry.dtype} {list(entry.shape)}"
            raise CheckpointError(f"{self.path}: {name}: {planned}; given {tensor.dtype} {list(tensor.shape)}")
        try:
            if file not in self._open:
                self._open[file] = (self._building / file).open("r+b")
            stream = self._open[file]
            stream.seek(position)
            if tensor.numel():
                stream.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            self._left[file] -= 1
            if not self._left[file]:
                _to_disk(self._open.pop(file))
        except OSError as error:
            raise CheckpointError(f"{self.path}: {file} cannot be written: {error.strerror}; nothing is left there") from None

    def finish(self) -> None:
        """Makes the folder appear. Raises CheckpointError, and leaves nothing, where planned tensors have not come."""
        try:
            if self._places:
                raise CheckpointError(f"{self.path}: not written: {some(self._places)}")
            for file in self._building.iterdir():
                with file.open("r+b") as stream:
                    os.fsync(stream.fileno())
            flush(self._building)
            os.rename(self._building, self.path)
            flush(self.path.parent)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Leaves nothing behind."""
        for stream in self._open.values():
            stream.close()
        self._open.clear()
        shutil.rmtree(self._building, ignore_errors=True)


def _spread(plan: Sequence[Entry], shard_bytes: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in plan:
        if shards[-1] and size + entry.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    return shards


def _to_disk(stream: BinaryIO) -> None:
    with stream:
        stream.flush()
        os.fsync(stream.fileno())
