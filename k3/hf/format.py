"""The safetensors file format, as far as this stack reads and writes it, and the error that all of k3.hf raises."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
LENGTH = struct.Struct("<Q")  # a file begins with its header's length
HEADER_LIMIT = 100_000_000  # bytes, the format's own

# In ascending order of the dtypes: files hold the greatest first, as the library writes them, so that every tensor is aligned.
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu, "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16, "BF16": torch.bfloat16,
    "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32, "F64": torch.float64, "I64": torch.int64, "U64": torch.uint64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
RANK = {name: i for i, name in enumerate(DTYPES)}


class CheckpointError(ValueError):
    """A folder that is not a whole checkpoint of the model its config.json describes; the message lists names."""


@dataclass(frozen=True)
class Entry:
    """A tensor as a header describes it; `dtype` is one of DTYPES."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def some(names: Iterable[str], most: int = 8) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def layout(entries: Iterable[Entry]) -> list[tuple[Entry, int]]:
    """The tensors of a file in the library's order, widest dtype first and then by name, each with the offset of its data."""
    out, offset = [], 0
    for entry in sorted(entries, key=lambda e: (-RANK[e.dtype], e.name)):
        out.append((entry, offset))
        offset += entry.nbytes
    return out


def header(entries: Iterable[tuple[Entry, int]]) -> bytes:
    """The bytes before the data, padded to a multiple of 8."""
    document: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for entry, start in entries:
        document[entry.name] = {
            "dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, start + entry.nbytes],
        }  # fmt: skip
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return LENGTH.pack(len(text)) + text


def read_header(file: Path) -> list[tuple[Entry, int]]:
    """The tensors of a file in the order of their data, each with the position of its first byte in the file.

    Raises CheckpointError for a file that is no safetensors file, is truncated, or whose header contradicts itself.
    """
    size = os.path.getsize(file)
    with file.open("rb") as stream:
        first = stream.read(LENGTH.size)
        length = LENGTH.unpack(first)[0] if len(first) == LENGTH.size else HEADER_LIMIT + 1
        if length > HEADER_LIMIT:
            raise CheckpointError(f"{file}: not a readable safetensors file (no header)")
        if LENGTH.size + length > size:
            raise CheckpointError(f"{file}: not a readable safetensors file, or truncated: a header of {length} in {size} bytes")
        text = stream.read(length)
    try:
        document = json.loads(text)
        found = [_entry(name, given) for name, given in document.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file}: not a readable safetensors file ({type(error).__name__}: {error})") from None
    found.sort(key=lambda item: item[1])
    start = LENGTH.size + length
    end = 0
    for entry, begin, stop in found:
        if begin != end or stop - begin != entry.nbytes:
            what = f"{entry.dtype} of shape {list(entry.shape)} is {entry.nbytes} bytes"
            raise CheckpointError(f"{file}: {entry.name}: {what}, the header gives it [{begin}, {stop}) after {end}")
        end = stop
    if start + end != size:
        how = "truncated" if size < start + end else "longer than its tensors"
        raise CheckpointError(f"{file}: {how}: {size} bytes, its header describes {start + end}; copy the file again")
    return [(entry, start + begin) for entry, begin, _ in found]


def _entry(name: str, given: dict[str, Any]) -> tuple[Entry, int, int]:
    if given["dtype"] not in DTYPES:
        raise ValueError(f"{name} has dtype {given['dtype']!r}; known are {', '.join(DTYPES)}")
    numbers = [*given["shape"], *given["data_offsets"]]
    if any(type(n) is not int or n < 0 for n in numbers) or len(given["data_offsets"]) != 2:
        raise ValueError(f"{name} has shape {given['shape']} at {given['data_offsets']}")
    begin, stop = given["data_offsets"]
    return Entry(name, given["dtype"], tuple(given["shape"])), begin, stop
