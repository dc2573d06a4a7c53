"""Regions of a checkpoint's tensors, one after another, for who holds no model: one process, on the CPU."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

Region = Sequence[tuple[int, int]]  # [first, last) along each axis


class Tensors:
    """The tensors that an index (parallel/checkpoint_index.py) lists. The last stored box stays in memory: what is asked for in
    the order in which it is stored is read once, and never more than one box beside it is held.
    """

    def __init__(self, path: Path, index: Metadata):
        self.path, self.index = path, index
        self._last: tuple[MetadataIndex, Tensor] | None = None

    def __contains__(self, name: str) -> bool:
        return name in self.index.state_dict_metadata

    def dtype(self, name: str) -> torch.dtype:
        return self._entry(name).properties.dtype  # type: ignore[return-value]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entry(name).size)

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """A copy of the tensor, or of a region of it."""
        entry = self._entry(name)
        wanted = [(0, n) for n in entry.size] if region is None else list(region)
        out = torch.empty([last - first for first, last in wanted], dtype=entry.properties.dtype)
        for chunk in entry.chunks:
            held = [(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes)]
            both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, held)]
            if math.prod(max(0, last - first) for first, last in both):
                part = self._chunk(name, chunk)
                out[_within(both, wanted)].copy_(part[_within(both, held)])
        return out

    def _entry(self, name: str) -> TensorStorageMetadata:
        entry = self.index.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        return entry

    def _chunk(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        where = MetadataIndex(name, chunk.offsets)
        if self._last is None or self._last[0] != where:
            self._last = None  # before the next one is read: one at a time
            info = self.index.storage_data[where]
            with (self.path / info.relative_path).open("rb") as file:
                file.seek(info.offset)
                self._last = where, torch.load(io.BytesIO(file.read(info.length)), weights_only=True)
        return self._last[1]


def _within(region: Region, outer: Region) -> tuple[slice, ...]:
    return tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(region, outer))
