"""A file of tensors that takes its checksum while it is written, and is compared with what it was to hold."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from torch import Tensor

from parallel.checkpoint_folder import CHUNK, CheckpointError


class CheckedFile:
    """Open for writing until `file` is closed; `crc` and `size` [bytes] are of what was written."""

    def __init__(self, path: Path):
        self.path, self.file, self.crc, self.size = path, path.open("wb"), 0, 0
        self._failure: OSError | None = None
        self._tensor = np.empty(0, np.uint8)
        self._pieces: list[np.ndarray | bytearray] = []

    def save(self, tensor: Tensor) -> None:
        """torch.save. The tensor's memory must stay as it is until `compare`."""
        self._tensor = tensor.reshape(-1).view(torch.uint8).numpy()
        try:
            torch.save(tensor, cast(IO[bytes], self))  # all that it asks of a file is `write` and `flush`
        except Exception:
            if self._failure is not None:  # torch.save raises something of its own instead: "unexpected pos 704 vs 598"
                raise self._failure from None
            raise

    def write(self, data: Any) -> int:
        """For torch.save. Raises OSError, as on a full disk."""
        self.crc = zlib.crc32(data, self.crc)
        self.size += len(data)
        own = np.frombuffer(data, np.uint8)
        if own.size == self._tensor.size and own.ctypes.data == self._tensor.ctypes.data:
            self._pieces.append(self._tensor)
        else:  # a record's head or tail, of some bytes
            if not self._pieces or not isinstance(self._pieces[-1], bytearray):
                self._pieces.append(bytearray())
            self._pieces[-1] += own.tobytes()  # type: ignore[misc]
        try:
            return self.file.write(data)
        except OSError as error:
            self._failure = error
            raise

    def flush(self) -> None:
        """Hands the system what this process still holds."""
        self.file.flush()

    def compare(self) -> None:
        """Reads the file. Raises CheckpointError where it differs: a comparison takes a third of the time of a checksum."""
        buffer = np.empty(CHUNK, np.uint8)
        with self.path.open("rb") as file:
            for piece in self._pieces:
                whole = np.frombuffer(piece, np.uint8)
                for at in range(0, whole.size, buffer.size):
                    part = whole[at : at + buffer.size]
                    there = buffer[: part.size]
                    if file.readinto(there) != part.size or not np.array_equal(there, part):
                        raise CheckpointError(f"{self.path.name} differs from what was written: check the disk")
            if file.read(1):
                raise CheckpointError(f"{self.path.name} is longer than what was written: check the disk")


@contextmanager
def one_checksum() -> Iterator[None]:
    """In each record torch.save notes a CRC-32 that torch.load never looks at, and that takes as long as the one of the file."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
