"""The short convolution for one more token of every row, its past inputs kept beside it. Legend: R rows, C channels, W taps."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def conv_step(x: Tensor, taps: Tensor, past: Tensor) -> Tensor:
    """x [R, C], taps [W, C] in the dtype of the computation -> silu of the convolution [R, C] in x's dtype.

    past [W-1, R, C], the inputs before x, oldest first, is moved on in place. No gradients.
    """
    last = taps.shape[0] - 1
    out = x.to(taps.dtype) * taps[last]
    for back in range(1, last + 1):
        out.addcmul_(past[last - back].to(taps.dtype), taps[last - back])
    for i in range(last - 1):
        past[i] = past[i + 1]
    if last:
        past[last - 1] = x
    return F.silu(out, inplace=True).to(x.dtype)
