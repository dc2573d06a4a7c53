"""Short causal depthwise convolution with SiLU, on the queries, keys and values of KDA (report 2.1.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import documents
from kernels.conv.shifted import ShortConv
from kernels.no_grad import call


def short_conv(
    x: Tensor, weight: Tensor, *, document_starts: Tensor | None = None, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """silu(sum_i weight[:, i] x[t - W + 1 + i]): the last tap multiplies the current token.

    x [B, T, C], best a transposed view of a contiguous [T, B, C]; weight [C, W], fp32 also where x is bf16. document_starts:
    bool [B, T], true at each document's first token; taps never cross one. initial_state [B, W-1, C]: the raw inputs before
    x, ignored in rows whose first token starts a document; with a state and no document_starts every row continues from it.

    Returns out [B, T, C] in x's dtype and memory order, and final_state [B, W-1, C]: the last raw inputs, zero where they
    belong to an earlier document than the last token, so that the next call may simply continue. The math is float32
    (float64 for float64 input); the backward pass keeps only x. Raises ValueError for shapes that do not fit.
    """
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[0] != x.shape[2] or weight.shape[1] < 1:
        raise ValueError(f"short_conv: x {tuple(x.shape)}, weight {tuple(weight.shape)}; give x [B, T, C] and weight [C, W]")
    batch, length, channels = x.shape
    past = weight.shape[1] - 1
    if initial_state is not None and tuple(initial_state.shape) != (batch, past, channels):
        raise ValueError(f"short_conv: initial_state {tuple(initial_state.shape)}; give [B, W-1, C] = {(batch, past, channels)}")
    if document_starts is not None:
        document_starts = documents.resolve(document_starts, batch, length, continues=False, device=x.device)
    state = initial_state if past else None
    return call(ShortConv, x, weight, document_starts, state), last_inputs(x, past, document_starts, initial_state)


def last_inputs(x: Tensor, past: int, document_starts: Tensor | None, initial_state: Tensor | None) -> Tensor:
    """The `past` = W-1 inputs that the next token's taps may read, [B, W-1, C]: what `short_conv` returns as final_state."""
    batch, length, channels = x.shape
    tail = x[:, max(0, length - past) :] if past else x[:, :0]
    if length < past:
        before = x.new_zeros(batch, past, channels) if initial_state is None else initial_state.to(x.dtype)
        tail = torch.cat([before[:, length:], tail], 1)
    if document_starts is None or not past or not length:
        return tail.clone()
    # number of documents that start after each of these inputs, up to the last token: any hides the input
    starts = document_starts[:, max(0, length - past) :].long()
    starts = torch.cat([starts.new_zeros(batch, past - starts.shape[1]), starts], 1)
    later = starts.flip(1).cumsum(1).flip(1) - starts
    return torch.where((later > 0).unsqueeze(-1), 0, tail)
