"""exp and tanh in place, by whichever library is quickest on this device.

torch's float32 exp and tanh on a CPU go through a vendor library that is three (exp) and seven (tanh) times slower than numpy's
vector code on processors of another vendor (measured on an AMD EPYC with AVX-512; both are right to 2 ulp). numpy works on the
tensor's own memory. Where numpy is missing, off the CPU, or inside a traced tensor, torch does it.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import numpy
except ImportError:  # torch alone is enough, only slower
    numpy = None  # type: ignore[assignment]


def _shared(x: Tensor) -> bool:
    return numpy is not None and type(x) is Tensor and x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


def exp_(x: Tensor) -> Tensor:
    """exp in place; x must not require a gradient. Returns x."""
    if not _shared(x):
        return x.exp_()
    array = x.numpy()
    with numpy.errstate(over="ignore", invalid="ignore"):
        numpy.exp(array, out=array)
    return x


def tanh_(x: Tensor) -> Tensor:
    """tanh in place; x must not require a gradient. Returns x."""
    if not _shared(x):
        return x.tanh_()
    array = x.numpy()
    numpy.tanh(array, out=array)
    return x
