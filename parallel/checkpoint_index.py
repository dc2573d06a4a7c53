"""Reads `.metadata`, torch_dist's index of a checkpoint, without trusting it.

The file is a pickle, and a pickle may call anything. This reader makes nothing but the record types of an index, and then checks
what they say: tensors alone, each covered whole, in files that state.json lists. What it returns is what is loaded from, so that
neither megatron-core nor torch ever unpickle the file.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from parallel.checkpoint_folder import METADATA, CheckpointError, Entry, unloadable

ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))},
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of tensors needs: it may be made to run code")
        return super().find_class(module, name)


def read(path: Path, files: Mapping[str, Entry]) -> Metadata:
    """The index of the checkpoint `path`, whose state.json lists `files`.

    Raises CheckpointError for one that names anything but records of tensors, or whose records do not hold together.
    """
    try:
        index = _Reader(io.BytesIO((path / METADATA).read_bytes())).load()
        wrong = list(_faults(index, files))
    except Exception as error:  # whatever bytes can be made to raise: nothing has run but the constructors of ALLOWED
        raise CheckpointError(unloadable(path, [f"{METADATA}: refused: {error}"])) from error
    if wrong:
        raise CheckpointError(unloadable(path, [f"{METADATA}: {line}" for line in wrong]))
    return index


def _faults(index: Any, files: Mapping[str, Entry]) -> Iterator[str]:
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        yield "not an index of tensors"
        return
    places = {(where.fqn, where.offset) for where in index.storage_data}
    for name, entry in index.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            yield f"{name}: an object that is no tensor"
            continue
        if not isinstance(entry.properties.dtype, torch.dtype):
            yield f"{name}: has no dtype"
        if any((name, chunk.offsets) not in places for chunk in entry.chunks):
            yield f"{name}: a part of it lies nowhere"
        boxes = [[(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes)] for chunk in entry.chunks]
        ranks = {len(entry.size), *(len(c.offsets) for c in entry.chunks), *(len(c.sizes) for c in entry.chunks)}
        if len(ranks) > 1 or any(not 0 <= a < b <= n for box in boxes for (a, b), n in zip(box, entry.size)):
            yield f"{name}: a part of it lies outside of it"
        elif sum(math.prod(b - a for a, b in box) for box in boxes) != math.prod(entry.size) or _overlap(boxes):
            yield f"{name}: its parts do not make up the whole"
    for where, info in index.storage_data.items():
        inside = isinstance(info, _StorageInfo) and info.relative_path in files and info.transform_descriptors is None
        if not inside or not 0 <= info.offset <= info.offset + info.length <= files[info.relative_path]["bytes"]:
            yield f"{where.fqn}: lies in {getattr(info, 'relative_path', None)!r}, which is no part of this checkpoint"


def _overlap(boxes: list[list[tuple[int, int]]]) -> bool:
    """Whether any two boxes share an element. Looks along the first axis, along which most tensors are cut."""
    if not boxes or not boxes[0]:
        return len(boxes) > 1
    open_: list[list[tuple[int, int]]] = []
    for box in sorted(boxes):
        open_ = [other for other in open_ if other[0][1] > box[0][0]]
        if any(all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(box, other)) for other in open_):
            return True
        open_.append(box)
    return False
