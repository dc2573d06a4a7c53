"""One file of a checkpoint: its checksum is taken on the way to the disk, and compared with what the disk gives back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
import xxhash
from torch import Tensor

from parallel import checkpoint_folder as disk
from parallel.checkpoint_folder import CheckpointError

FLUSH = 1 << 26  # bytes that are written before the disk is made to take them


class CheckedFile:
    """A new file to save tensors to. `size` is what was written so far, in bytes. Use as a context; `close` inside it.

    The disk works while tensors are still written: another thread flushes.
    """

    def __init__(self, path: Path):
        self.path, self.file, self.size = path, path.open("wb"), 0
        self._checksum = xxhash.xxh3_64()
        self._failure: OSError | None = None
        self._behind = ThreadPoolExecutor(1, "flushes")
        self._flushes: list[Future[None]] = []
        self._flushed = 0

    def save(self, tensor: Tensor) -> tuple[int, int]:
        """Appends a tensor that is contiguous and alone in its storage; (its first byte, bytes). Raises OSError."""
        at = self.size
        try:
            with _no_second_checksum():
                torch.save(tensor, cast(IO[bytes], self))  # all that it asks of a file is `write` and `flush`
        except Exception:
            if self._failure is not None:  # torch.save raises something of its own instead: "unexpected pos 704 vs 598"
                raise self._failure from None
            raise
        if self.size - self._flushed >= FLUSH and all(flush.done() for flush in self._flushes):
            self._flush()
        return at, self.size - at

    def write(self, data: Any) -> int:
        """For torch.save."""
        self._checksum.update(data)
        self.size += len(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self._failure = error
            raise

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> disk.Entry:
        """Flushes the file to the disk and reads it back; what state.json says of it.

        Raises OSError where the disk refuses, CheckpointError where it gives back something else.
        """
        self._flush()
        entry = disk.entry(self.path)
        for flush in self._flushes:  # every one: the system tells of a failure once
            flush.result()
        self.file.close()
        if entry != {"bytes": self.size, "xxh3": self._checksum.hexdigest()}:
            raise CheckpointError(f"{self.path.name} differs from what was written: check the disk, and its free space")
        return entry

    def _flush(self) -> None:
        self.file.flush()
        self._flushes.append(self._behind.submit(os.fsync, self.file.fileno()))
        self._flushed = self.size

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._behind.shutdown()
        self.file.close()


@contextmanager
def _no_second_checksum() -> Iterator[None]:
    """In each record torch.save notes a CRC-32 that torch.load never looks at, and that takes longer than the writing."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
