"""Short convolution, one tap at a time in plain autograd: the reading that the fast path must agree with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import documents
from kernels.precision import math_dtype


def short_conv(x: Tensor, weight: Tensor, *, document_starts: Tensor, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, length, channels = x.shape
    width = weight.shape[1]
    math = math_dtype(x, weight)
    past = x.new_zeros(batch, width - 1, channels) if initial_state is None else initial_state.to(x.dtype)
    history = torch.cat([past, x], 1)  # token t is history[t + width - 1]
    number = documents.ids(document_starts)
    number = torch.cat([number.new_zeros(batch, width - 1), number], 1)  # the state belongs to document 0
    total = torch.zeros(batch, length, channels, dtype=math, device=x.device)
    for tap in range(width):
        same = number[:, tap : tap + length] == number[:, width - 1 :]
        seen = torch.where(same.unsqueeze(-1), history[:, tap : tap + length], 0)
        total = total + weight[:, tap].to(math) * seen.to(math)
    current = number[:, length:] == number[:, -1:]  # an earlier document's inputs must not reach the next call
    return F.silu(total).to(x.dtype), torch.where(current.unsqueeze(-1), history[:, length:], 0)
