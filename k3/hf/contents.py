"""What is in a published folder, said from its headers alone."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from k3.config import K3Config
from k3.hf.stored import Stored


@dataclass
class Part:
    """Of one role on the cards (attention, expert, norm, ...), or of what is no part of the language model."""

    parameters: int = 0
    tensors: int = 0
    nbytes: int = 0
    dtypes: Counter[str] = field(default_factory=Counter)  # dtype -> tensors


@dataclass(frozen=True)
class Contents:
    config: K3Config
    parts: dict[str, Part]  # in the model's order, then vision_tower and mm_projector
    shards: dict[str, int]  # file -> bytes of its tensors
    packed: int  # weights stored as MXFP4
    unpacked_experts: int  # weights that could be and are not

    @property
    def quantised(self) -> str | None:
        """ "mxfp4" where any weight is packed."""
        return "mxfp4" if self.packed else None

    @property
    def parameters(self) -> int:
        """Of the language model."""
        return sum(p.parameters for name, p in self.parts.items() if name not in ("vision_tower", "mm_projector"))

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.parts.values())


def contents(path: Path) -> Contents:
    """Reads config.json and headers; raises as `k3.hf.load` does."""
    stored = Stored(path)
    entries, parts = stored.folder.entries, dict[str, Part]()
    packed = unpacked = 0

    def add(part: str, names: tuple[str, ...], parameters: int) -> None:
        here = parts.setdefault(part, Part())
        here.parameters += parameters
        for name in names:
            here.tensors += 1
            here.nbytes += entries[name].nbytes
            here.dtypes[entries[name].dtype] += 1

    for piece in stored.pieces:
        is_packed = piece.packed in entries
        packed += is_packed
        unpacked += piece.card.quantise is not None and not is_packed
        add(piece.card.role, (piece.packed, piece.scale) if is_packed else (piece.name,), math.prod(piece.shape))
    for entry in stored.passed_through:
        add(entry.name.split(".")[0], (entry.name,), math.prod(entry.shape))
    shards = dict.fromkeys(stored.folder.files, 0)
    for name, entry in entries.items():
        shards[stored.folder.file_of[name]] += entry.nbytes
    return Contents(stored.config, parts, shards, packed, unpacked)
