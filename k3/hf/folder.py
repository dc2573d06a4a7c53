"""Reads a published folder one tensor, or a piece of one, at a time; nothing is ever unpickled or executed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from k3.hf.format import CONFIG, DTYPES, INDEX, SINGLE, CheckpointError, Entry, read_header, some


class Folder:
    """A folder with config.json and safetensors: one file, or several with an index.

    `entries` are the tensors by name, in the order of files and of the data in them. Opening reads headers alone. Raises
    CheckpointError for a folder that is incomplete, damaged, or that refers to anything outside itself.
    """

    def __init__(self, path: Path):
        self.path = path
        if not (path / CONFIG).is_file():
            raise CheckpointError(f"{path}: no {CONFIG}; give the folder of a published checkpoint")
        where = self._index() if (path / INDEX).is_file() else None
        if where is None and not (path / SINGLE).is_file():
            raise CheckpointError(f"{path}: neither {SINGLE} nor {INDEX} is there")
        self.files = [SINGLE] if where is None else sorted(set(where.values()))
        self.entries: dict[str, Entry] = {}
        self.file_of: dict[str, str] = {}
        self._starts: dict[str, int] = {}
        self._mapped: dict[str, np.ndarray] = {}
        for file in self.files:
            for entry, start in read_header(self._inside(file)):
                if where is not None and where.get(entry.name) != file:
                    listed = f"in {where[entry.name]}" if entry.name in where else "nowhere"
                    raise CheckpointError(f"{path}: {file} holds {entry.name}, which {INDEX} has {listed}")
                self.entries[entry.name] = entry
                self.file_of[entry.name] = file
                self._starts[entry.name] = start
        if where is not None and (absent := sorted(set(where) - set(self.entries))):
            raise CheckpointError(f"{path}: {INDEX} names tensors that their files do not hold: {some(absent)}")

    @cached_property
    def config_text(self) -> str:
        return _text(self._inside(CONFIG))

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json as it is."""
        return _json_object(self.path / CONFIG, self.config_text)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())

    def read(self, name: str, index: Sequence[tuple[int, int]] | None = None) -> Tensor:
        """A copy of the tensor, or of the part [first, last) along each axis that `index` gives; only that is read.

        Raises CheckpointError for a name that is not there.
        """
        if name not in self.entries:
            raise CheckpointError(f"{self.path}: missing: {name}")
        entry = self.entries[name]
        dtype = DTYPES[entry.dtype]
        ranges = list(index) if index is not None else [(0, n) for n in entry.shape]
        shape = tuple(last - first for first, last in ranges)
        if not math.prod(shape):
            return torch.empty(shape, dtype=dtype)
        file = self.file_of[name]
        if file not in self._mapped:
            self._mapped[file] = np.memmap(self._inside(file), dtype=np.uint8, mode="r")
        raw = self._mapped[file][self._starts[name] : self._starts[name] + entry.nbytes]
        if shape:
            *lead, (first, last) = ranges
            columns = slice(first * dtype.itemsize, last * dtype.itemsize)  # bytes
            raw = raw.reshape(*entry.shape[:-1], -1)[(*(slice(*r) for r in lead), columns)]
        return torch.from_numpy(np.array(raw, copy=True, order="C").reshape(-1)).view(dtype).view(shape)

    def _index(self) -> dict[str, str]:
        document = _json_object(self.path / INDEX, _text(self._inside(INDEX)))
        where = document.get("weight_map")
        if not isinstance(where, dict) or not where or not all(isinstance(file, str) for file in where.values()):
            raise CheckpointError(f"{self.path / INDEX}: no weight_map of tensor names to file names")
        files = sorted(set(where.values()))
        foreign = [f for f in files if "/" in f or "\\" in f or f in ("", ".", "..") or not f.endswith(".safetensors")]
        if foreign:
            raise CheckpointError(f"{self.path / INDEX}: not names of safetensors files beside it: {some(map(repr, foreign))}")
        if absent := [f for f in files if not (self.path / f).is_file()]:
            raise CheckpointError(f"{self.path}: {INDEX} names files that are not there: {some(absent)}")
        return where

    def _inside(self, file: str) -> Path:
        """The file's path, if it lies in the folder itself."""
        target = (self.path / file).resolve()
        if not target.is_relative_to(self.path.resolve()):
            raise CheckpointError(f"{self.path / file}: a link to {target}, outside the folder; put the file itself there")
        return self.path / file


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file}: not UTF-8 text ({error})") from None


def _json_object(file: Path, text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not JSON ({error})") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{file}: holds a {type(document).__name__}; a JSON object is expected")
    return document
