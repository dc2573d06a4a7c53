"""The document map of a packed batch (design principle 2).

`document_starts` is a bool tensor [B, T], true at each document's first token. True at position 0 resets; false at 0
continues from a given state. None means one fresh document a row, or a continuation where a state is given. The map drives the
convolution, the KDA state, the MLA mask, the loss and MTP; nothing else re-derives document boundaries.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fresh(batch: int, length: int, device: torch.device | str = "cpu") -> Tensor:
    """The map of rows that each hold one document: [B, T], true at position 0 only."""
    starts = torch.zeros(batch, length, dtype=torch.bool, device=device)
    starts[:, :1] = True
    return starts


def resolve(document_starts: Tensor | None, batch: int, length: int, *, continues: bool, device: torch.device | str) -> Tensor:
    """The explicit map [B, T] for what a caller gave; `continues` says that an initial state came along with None."""
    if document_starts is None:
        starts = fresh(batch, length, device)
        if continues:
            starts[:, :1] = False
        return starts
    if document_starts.dtype != torch.bool or tuple(document_starts.shape) != (batch, length):
        raise ValueError(
            f"document_starts is {document_starts.dtype} of shape {tuple(document_starts.shape)}; "
            f"give a bool tensor of shape {(batch, length)}, true at each document's first token"
        )
    return document_starts


def ids(document_starts: Tensor) -> Tensor:
    """Document number of each token within its row, [B, T] int64; tokens continuing an earlier document have 0."""
    return document_starts.long().cumsum(1)


def offsets(document_starts: Tensor) -> Tensor:
    """Cumulative lengths over the flattened batch, int32 [N + 1], as variable-length kernels take them (cu_seqlens).

    Every row begins a segment, whether or not its first token begins a document.
    """
    starts = document_starts.clone()
    starts[:, :1] = True
    first = starts.reshape(-1).nonzero().squeeze(1)
    end = torch.tensor([starts.numel()], device=first.device)
    return torch.cat([first, end]).to(torch.int32)


def target_mask(document_starts: Tensor, *, ahead: int = 1) -> Tensor:
    """Which positions have a target `ahead` tokens later inside the same document and row: bool [B, T].

    `document_starts` covers the tokens *and* the targets, so pass the map of all T + 1 tokens and keep the first T columns
    where the target of the last input token is known. The last `ahead` positions of what is passed are false.
    """
    number = ids(document_starts)
    mask = torch.zeros_like(document_starts)
    if number.shape[1] > ahead:
        mask[:, :-ahead] = number[:, ahead:] == number[:, :-ahead]
    return mask
