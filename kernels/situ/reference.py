"""SiTU-GLU and SwiGLU in plain autograd: the readings that the fast paths must agree with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.precision import math_dtype


def _scaled(out: Tensor, gate: Tensor, scale: Tensor | None) -> Tensor:
    if scale is not None:
        out = out * scale.to(out.dtype).unsqueeze(-1)
    return out.to(gate.dtype)


def situ_glu(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float, scale: Tensor | None) -> Tensor:
    math = math_dtype(gate, up)
    a, b = gate.to(math), up.to(math)
    return _scaled(beta * torch.tanh(a / beta) * torch.sigmoid(a) * linear_beta * torch.tanh(b / linear_beta), gate, scale)


def swiglu(gate: Tensor, up: Tensor, *, scale: Tensor | None) -> Tensor:
    math = math_dtype(gate, up)
    return _scaled(F.silu(gate.to(math)) * up.to(math), gate, scale)
