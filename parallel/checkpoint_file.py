"""One file of a checkpoint: its checksum is taken on the way to the disk, and compared with what the disk gives back."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

from parallel import checkpoint_folder as disk
from parallel.checkpoint_folder import CheckpointError


class CheckedFile:
    """A new file to write to. `size` is what was written so far, in bytes."""

    def __init__(self, path: Path):
        self.path, self.file, self.crc, self.size = path, path.open("wb"), 0, 0

    def write(self, data: Any) -> int:
        self.crc = zlib.crc32(data, self.crc)
        self.size += len(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def close(self) -> dict[str, int]:
        """Flushes the file to the disk and reads it back; what state.json says of it.

        Raises OSError where the disk refuses, CheckpointError where it gives back something else.
        """
        with self:
            self.file.flush()
            os.fsync(self.file.fileno())
        entry = disk.entry(self.path)
        if entry != {"bytes": self.size, "crc32": self.crc}:
            raise CheckpointError(f"{self.path.name} differs from what was written: check the disk, and its free space")
        return entry
