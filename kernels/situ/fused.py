"""The gated units of report 2.3 with their gradients written out, computed a cache-sized block of tokens at a time.

Nothing but the inputs is kept for the backward pass. Legend: N tokens, F width of one branch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.fastmath import tanh_
from kernels.precision import math_dtype

CPU_ELEMENTS = 1 << 16  # of one buffer; measured best between 2^13 and 2^22


class Unit(Protocol):
    def value(self, a: Tensor, b: Tensor) -> Tensor: ...

    def gradients(self, a: Tensor, b: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(value, d_a, d_b) for the gradient d of the value; new tensors all, d is left alone."""
        ...


@dataclass(frozen=True)
class Situ:
    beta: float
    linear_beta: float

    def value(self, a: Tensor, b: Tensor) -> Tensor:
        out = tanh_(a / self.beta).mul_(torch.sigmoid(a))
        return out.mul_(tanh_(b / self.linear_beta)).mul_(self.beta * self.linear_beta)

    def gradients(self, a: Tensor, b: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        t, s, u = tanh_(a / self.beta), torch.sigmoid(a), tanh_(b / self.linear_beta)
        gate = t * s
        value = (gate * u).mul_(self.beta * self.linear_beta)
        # d/da [beta tanh(a/beta) sigma(a)] = s ((1 - t^2) + beta t (1 - s)), and t (1 - s) = t - gate
        slope = torch.sub(t, gate).mul_(self.beta).add_(1).addcmul_(t, t, value=-1).mul_(s)
        d_a = slope.mul_(u).mul_(d).mul_(self.linear_beta)
        # d/db [linear_beta tanh(b/linear_beta)] = 1 - u^2
        d_b = gate.mul_(self.beta).mul_(d)
        d_b.addcmul_(d_b, u.mul_(u), value=-1)
        return value, d_a, d_b


@dataclass(frozen=True)
class Swiglu:
    def value(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.nn.functional.silu(a).mul_(b)

    def gradients(self, a: Tensor, b: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate = torch.nn.functional.silu(a)
        d_a = torch.ops.aten.silu_backward(d * b, a)
        return gate * b, d_a, gate.mul_(d)


def _flat(x: Tensor) -> Tensor:
    """[..., F] -> [N, F]; a view for one half of a fused tensor."""
    return x.reshape(-1, x.shape[-1])


def _blocks(x: Tensor) -> Iterator[slice]:
    size = x.shape[0] if x.is_cuda else max(1, CPU_ELEMENTS * torch.get_num_threads() // max(1, x.shape[1]))
    for start in range(0, x.shape[0], max(1, size)):
        yield slice(start, start + size)


class GatedUnit(torch.autograd.Function):
    """value(gate, up) [* scale] for a Unit; saves its inputs only."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, gate: Tensor, up: Tensor, scale: Tensor | None) -> Tensor:
        ctx.unit = unit
        ctx.save_for_backward(gate, up, scale)
        math = math_dtype(gate, up)
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        out_NF, gate_NF, up_NF = _flat(out), _flat(gate), _flat(up)
        scale_N1 = None if scale is None else scale.reshape(-1, 1)
        for block in _blocks(gate_NF):
            value = unit.value(gate_NF[block].to(math), up_NF[block].to(math))
            if scale_N1 is not None:
                value.mul_(scale_N1[block].to(math))
            out_NF[block] = value
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, scale = ctx.saved_tensors
        math = math_dtype(gate, up)
        d_gate, d_up = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (gate, up))
        d_scale = None if scale is None else torch.empty(scale.shape, dtype=scale.dtype, device=scale.device)
        gate_NF, up_NF, d_NF, d_gate_NF, d_up_NF = (_flat(t) for t in (gate, up, d_out, d_gate, d_up))
        scale_N1 = None if scale is None else scale.reshape(-1, 1)
        for block in _blocks(gate_NF):
            d = d_NF[block].to(math)
            d_value = d if scale_N1 is None else d * scale_N1[block].to(math)
            value, d_a, d_b = ctx.unit.gradients(gate_NF[block].to(math), up_NF[block].to(math), d_value)
            d_gate_NF[block], d_up_NF[block] = d_a, d_b
            if d_scale is not None:
                d_scale.view(-1)[block] = value.mul_(d).sum(-1)
        return None, d_gate, d_up, d_scale
