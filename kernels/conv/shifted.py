"""Short convolution as W shifted products a block of time steps at a time, SiLU fused; only the raw inputs are kept.

The main sweep convolves every row as if it were one document with nothing before it. The few tokens for which that is wrong
(the first W-1 of each later document, and of a row that continues from a state) are computed again from gathered windows, so
packing costs next to nothing. Legend: T time steps, B rows, C channels, W taps, A tokens computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import documents
from kernels.precision import math_dtype

CPU_ELEMENTS = 1 << 18  # of one block: its handful of buffers stay near the level-2 cache


def _blocks(x_TBC: Tensor, width: int) -> Iterator[tuple[int, int]]:
    steps, step = x_TBC.shape[0], max(1, x_TBC.shape[1] * x_TBC.shape[2])
    size = steps if x_TBC.is_cuda else max(width, CPU_ELEMENTS * torch.get_num_threads() // step)
    for start in range(0, steps, max(1, size)):
        yield start, min(start + size, steps)


def _convolve(x_TBC: Tensor, taps_WC: Tensor, start: int, end: int) -> Tensor:
    """Pre-activations of steps [start, end), in the dtype of the taps; inputs before step 0 are zero."""
    last = taps_WC.shape[0] - 1
    low = max(0, start - last)
    x = x_TBC[low:end].to(taps_WC.dtype)
    out = x[start - low :] * taps_WC[last]
    for back in range(1, last + 1):
        first = max(start, back)  # the first step that has an input `back` steps earlier
        if first < end:
            out[first - start :].addcmul_(x[first - back - low : end - back - low], taps_WC[last - back])
    return out


@dataclass(frozen=True)
class _Windows:
    """The tokens that the main sweep gets wrong, and where the inputs of their taps lie."""

    time: Tensor  # [A]
    row: Tensor  # [A]
    source: Tensor  # [A, W] step of each tap's input; negative ones lie in the state
    seen: Tensor  # [A, W] whether that input belongs to the token's document

    @staticmethod
    def find(document_starts: Tensor | None, batch: int, length: int, width: int, state: bool, device: Any) -> _Windows | None:
        if width == 1 or (document_starts is None and not state):
            return None
        starts = documents.resolve(document_starts, batch, length, continues=state, device=device)
        number = documents.ids(starts)
        # number 0 continues from the state; without a state nothing is there, which no number matches
        before = number.new_full((batch, width - 1), 0 if state else -1)
        padded = torch.cat([before, number], 1)
        wrong = padded[:, :length] != number
        if state:
            wrong[:, : width - 1] = True
        else:
            # the zeros before step 0 are right as they are, if no document starts after it and before the token
            wrong[:, : width - 1] = number[:, : width - 1] != number[:, :1]
        row, time = wrong.nonzero(as_tuple=True)
        if not row.numel():
            return None
        source = time.unsqueeze(1) + torch.arange(1 - width, 1, device=device)
        seen = padded[row.unsqueeze(1), source + width - 1] == number[row, time].unsqueeze(1)
        return _Windows(time, row, source, seen)

    def gather(self, x_TBC: Tensor, state: Tensor | None, math: torch.dtype) -> Tensor:
        """The masked inputs [A, W, C]."""
        row = self.row.unsqueeze(1)
        windows = x_TBC[self.source.clamp(min=0), row].to(math)
        if state is not None:
            place = (self.source + state.shape[1]).clamp(max=state.shape[1] - 1)
            windows = torch.where((self.source < 0).unsqueeze(-1), state[row, place].to(math), windows)
        return windows.masked_fill_(~self.seen.unsqueeze(-1), 0)

    def scatter(self, d_windows: Tensor, d_x_TBC: Tensor, d_state: Tensor | None) -> None:
        """Adds the gradient [A, W, C] of the gathered inputs to where they came from."""
        row = self.row.unsqueeze(1).expand_as(self.source)
        inside = self.seen & (self.source >= 0)
        # summed in the dtype of the math first: several windows share an input, and bf16 would round each addition
        time, rows, values = self.source[inside], row[inside], d_windows[inside]
        where, inverse = torch.unique(time * d_x_TBC.shape[1] + rows, return_inverse=True)
        summed = values.new_zeros(len(where), values.shape[1]).index_add_(0, inverse, values)
        time, rows = where // d_x_TBC.shape[1], where % d_x_TBC.shape[1]
        d_x_TBC[time, rows] = (d_x_TBC[time, rows].to(summed.dtype) + summed).to(d_x_TBC.dtype)
        if d_state is not None:
            outside = self.seen & (self.source < 0)
            place = self.source[outside] + d_state.shape[1]
            d_state.index_put_((row[outside], place), d_windows[outside], accumulate=True)


class ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, document_starts: Tensor | None, state: Tensor | None) -> Tensor:
        math = math_dtype(x, weight)
        batch, length, _ = x.shape
        windows = _Windows.find(document_starts, batch, length, weight.shape[1], state is not None, x.device)
        x_TBC, taps_WC = x.transpose(0, 1), weight.t().to(math).contiguous()
        out_TBC = torch.empty_like(x_TBC)  # keeps the memory order of x
        for start, end in _blocks(x_TBC, weight.shape[1]):
            out_TBC[start:end] = F.silu(_convolve(x_TBC, taps_WC, start, end), inplace=True)
        if windows is not None:
            before = (windows.gather(x_TBC, state, math) * taps_WC).sum(1)
            out_TBC[windows.time, windows.row] = F.silu(before).to(x.dtype)
        ctx.windows = windows
        ctx.save_for_backward(x, weight, state)
        return out_TBC.transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, state = ctx.saved_tensors
        windows: _Windows | None = ctx.windows
        math, last = math_dtype(x, weight), weight.shape[1] - 1
        x_TBC, d_TBC, taps_WC = x.transpose(0, 1), d_out.transpose(0, 1), weight.t().to(math).contiguous()
        d_x_TBC = torch.empty_like(x_TBC)
        d_taps_WC = torch.zeros_like(taps_WC)
        blocks = list(_blocks(x_TBC, weight.shape[1]))
        size = max((end - start for start, end in blocks), default=0)
        # d_before of a block and of the W-1 steps after it; products with x are summed over blocks before over time
        d_before = _zeros_like(x_TBC, size + last, math)
        sums = [_zeros_like(x_TBC, size, math) for _ in range(last + 1)]
        for start, end in reversed(blocks):
            steps = end - start
            after = d_before[:last].clone()
            d_before[steps : steps + last] = after
            before = _convolve(x_TBC, taps_WC, start, end)
            here = d_before[:steps]
            here.copy_(torch.ops.aten.silu_backward(d_TBC[start:end].to(math), before))
            if windows is not None:
                inside = (windows.time >= start) & (windows.time < end)
                here[windows.time[inside] - start, windows.row[inside]] = 0
            d_x = here * taps_WC[last]
            for back in range(1, last + 1):
                d_x.addcmul_(d_before[back : back + steps], taps_WC[last - back])
            d_x_TBC[start:end] = d_x
            low = max(0, start - last)
            seen = x_TBC[low:end].to(math)
            for back in range(last + 1):
                first = max(start, back)
                if first < end:
                    sums[back][: end - first].addcmul_(here[first - start :], seen[first - back - low : end - back - low])
        for back in range(last + 1):
            d_taps_WC[last - back] = sums[back].sum((0, 1))
        d_state = None if state is None else torch.zeros(state.shape, dtype=math, device=state.device)
        if windows is not None:
            inputs = windows.gather(x_TBC, state, math)
            before = (inputs * taps_WC).sum(1)
            d_before_AC = torch.ops.aten.silu_backward(d_TBC[windows.time, windows.row].to(math), before)
            d_taps_WC += (inputs * d_before_AC.unsqueeze(1)).sum(0)
            windows.scatter(d_before_AC.unsqueeze(1) * taps_WC, d_x_TBC, d_state)
        d_weight = d_taps_WC.t().to(weight.dtype)
        return d_x_TBC.transpose(0, 1), d_weight, None, None if d_state is None else d_state.to(state.dtype)


def _zeros_like(x_TBC: Tensor, steps: int, math: torch.dtype) -> Tensor:
    """Zeros [steps, B, C] in x's memory order, so that products of the two run along contiguous memory."""
    _, batch, channels = x_TBC.shape
    if x_TBC.stride(0) < x_TBC.stride(1):
        return torch.zeros(batch, steps, channels, dtype=math, device=x_TBC.device).transpose(0, 1)
    return torch.zeros(steps, batch, channels, dtype=math, device=x_TBC.device)
