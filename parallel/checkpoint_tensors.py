"""Regions of a checkpoint's tensors, straight from its files' bytes: no more is read than what is asked for, and nothing is ever
unpickled, since the index says shapes and dtypes.

A box is stored as torch.save writes a tensor: a zip archive whose record `data/0` are the bytes, uncompressed.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from parallel.checkpoint_folder import CheckpointError

Region = Sequence[tuple[int, int]]  # [first, last) along each axis


class Tensors:
    """The tensors that an index (parallel/checkpoint_index.py) lists. Raises CheckpointError for a box that is not stored so."""

    def __init__(self, path: Path, index: Metadata):
        self.path, self.index = path, index
        self._mapped: dict[str, np.memmap] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.index.state_dict_metadata

    def dtype(self, name: str) -> torch.dtype:
        return self._entry(name).properties.dtype  # type: ignore[return-value]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entry(name).size)

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """A copy of the tensor, or of a region of it, on the CPU."""
        whole = [(0, n) for n in self.shape(name)]
        wanted = whole if region is None else region
        out = torch.empty([last - first for first, last in wanted], dtype=self.dtype(name))
        self.fill(out, name, wanted)
        return out

    def fill(self, out: Tensor, name: str, region: Region) -> None:
        """Writes a region into `out`, of its shape and dtype, on whatever device.

        Raises CheckpointError for a region that does not lie in the tensor, or another dtype.
        """
        shape, dtype = self.shape(name), self.dtype(name)
        inside = len(region) == len(shape) and all(0 <= first <= last <= n for (first, last), n in zip(region, shape))
        if not inside or dtype != out.dtype:
            asked = f"{[list(r) for r in region]} of {out.dtype}"
            raise CheckpointError(f"{self.path}: {name} is {dtype} {list(shape)}, which does not hold {asked}")
        plain = out.device.type == "cpu" and out.is_contiguous()
        here = out if plain else torch.empty(out.shape, dtype=out.dtype)
        into = _bytes_of(here)
        for chunk in self._entry(name).chunks:
            held = [(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes)]
            both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(region, held)]
            if math.prod(max(0, last - first) for first, last in both):
                stored = self._bytes(name, chunk, out.dtype.itemsize)
                into[_within(both, region, out.dtype.itemsize)] = stored[_within(both, held, out.dtype.itemsize)]
        if not plain:
            out.copy_(here)

    def _entry(self, name: str) -> TensorStorageMetadata:
        entry = self.index.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        return entry

    def _bytes(self, name: str, chunk: ChunkStorageMetadata, width: int) -> np.ndarray:
        """uint8 [*sizes], the last axis in bytes: a view of the file."""
        info = self.index.storage_data[MetadataIndex(name, chunk.offsets)]
        if info.relative_path not in self._mapped:
            self._mapped[info.relative_path] = np.memmap(self.path / info.relative_path, dtype=np.uint8, mode="r")
        record = self._mapped[info.relative_path][info.offset : info.offset + info.length]
        size = math.prod(chunk.sizes) * width
        try:
            start = _data(record, size)
        except (ValueError, KeyError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{self.path}: {name} is not stored as torch.save writes a tensor: {error}") from error
        *lead, last = chunk.sizes or (1,)
        return record[start : start + size].reshape(*lead, last * width)


def _data(record: np.ndarray, size: int) -> int:
    """Where in a record the tensor's bytes begin."""
    entries = zipfile.ZipFile(_Bytes(record)).infolist()
    (data,) = [entry for entry in entries if "/data/" in entry.filename]
    if data.compress_type != zipfile.ZIP_STORED or data.file_size != size:
        raise ValueError(f"{data.file_size} bytes, where {size} are expected")
    for order in entries:
        at = _start(record, order)
        if order.filename.endswith("/byteorder") and record[at : at + order.file_size].tobytes() != b"little":
            raise ValueError("it comes from a machine of another byte order")
    start = _start(record, data)
    if start + size > len(record):
        raise ValueError("it is cut off")
    return start


def _start(record: np.ndarray, entry: zipfile.ZipInfo) -> int:
    """Behind a local header: 30 bytes, of which the last four are the lengths of a name and of what follows it."""
    at = entry.header_offset
    name, extra = (int.from_bytes(record[i : i + 2].tobytes(), "little") for i in (at + 26, at + 28))
    return at + 30 + name + extra


class _Bytes(io.RawIOBase):
    """A file of bytes that are somewhere else, without a copy."""

    def __init__(self, data: np.ndarray):
        self.data, self.at = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: len(self.data)}[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: object) -> int:
        into = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        part = self.data[self.at : self.at + len(into)]
        into[: len(part)] = part.data
        self.at += len(part)
        return len(part)


def _bytes_of(tensor: Tensor) -> np.ndarray:
    """uint8 [*shape], the last axis in bytes: a view of a contiguous tensor."""
    *lead, last = tensor.shape or (1,)
    flat = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return flat.reshape(*lead, last * tensor.element_size())


def _within(region: Region, outer: Region, width: int) -> tuple[slice, ...]:
    """`region` as an index into bytes of what holds `outer`."""
    if not region:
        return (slice(None),)
    cuts = [(a - first, b - first) for (a, b), (first, _) in zip(region, outer)]
    *lead, (first, last) = cuts
    return (*(slice(a, b) for a, b in lead), slice(first * width, last * width))
