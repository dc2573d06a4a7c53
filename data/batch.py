"""What a step reads: packed rows of tokens with their document map (design principle 2)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """B rows of T tokens. A document cut by a row's edge begins a fresh context in the next row."""

    tokens: Tensor  # [B, T] int64
    labels: Tensor  # [B, T] int64, the token after each
    document_starts: Tensor  # [B, T] bool, true at each document's first token and at position 0
    loss_mask: (
        Tensor  # [horizon, B, T] bool: [m] is true where the token m + 1 ahead counts (same document, same row, no padding; in
        # fine-tuning the assistant's own)
    )
    padding: Tensor | None = None  # [B, T] bool, true where there is no token; None: nowhere

    def to(self, device: torch.device | str) -> Batch:
        """This batch on another device."""
        there = {f.name: v.to(device, non_blocking=True) for f in fields(self) if (v := getattr(self, f.name)) is not None}
        return type(self)(**there)


@dataclass(frozen=True)
class StepBatch:
    """One data rank's share of one optimizer step."""

    micro_batches: list[Batch]
    index: int  # the step, from 0
    tokens: int  # of the whole step, over all data ranks
    idle: str | None = None  # why nothing is to be learnt from it: no parameter moves; alike on all ranks


def collate(
    rows: np.ndarray,
    starts: np.ndarray,
    *,
    horizon: int,
    filled: np.ndarray | None = None,
    counted: np.ndarray | None = None,
) -> Batch:
    """Rows of T + 1 tokens [B, T + 1] and their document map (bool, same shape) as a batch.

    `filled` says where tokens are, if any row has padding; `counted`, which tokens count as targets (None: all). Both bool, same
    shape.
    """
    import torch

    from kernels.documents import target_mask

    whole = torch.from_numpy(starts.astype(bool))
    whole[:, 0] = True
    mask = torch.stack([target_mask(whole, ahead=m + 1)[:, :-1] for m in range(horizon)])
    length = rows.shape[1] - 1
    if counted is not None:
        targets = torch.from_numpy(counted.astype(bool))
        for m in range(min(horizon, length)):  # position t has the target t + m + 1; the last m have none
            mask[m, :, : length - m] &= targets[:, m + 1 :]
    padding = None
    if filled is not None and not filled.all():
        padding = torch.from_numpy(~filled[:, :-1])
        mask &= ~padding
    ids = torch.from_numpy(rows.astype(np.int64))
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), whole[:, :-1].contiguous(), mask, padding)
