"""What every layer of one forward pass shares."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Context:
    document_starts: Tensor  # bool [B, T]: the one document map (kernels/documents.py)
    counted: Tensor | None = None  # bool [T * B] in the order of the hidden rows: not padding; None counts all
    share: float = 1.0  # this micro-batch's share of the step's tokens: scales auxiliary losses
