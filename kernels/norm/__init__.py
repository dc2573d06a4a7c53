"""RMSNorm, plain and gated: x / sqrt(mean(x^2) + eps) * weight, statistics and products in float32 (float64 for float64)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.no_grad import call
from kernels.norm.reference import gated_rms_norm as gated_rms_norm_reference
from kernels.norm.reference import rms_norm as rms_norm_reference

__all__ = [
    "gated_rms_norm", "gated_rms_norm_reference", "inverse_rms", "norm_backward", "rms_norm", "rms_norm_reference",
]  # fmt: skip


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """RMSNorm over the last axis. x [..., d], weight [d]; returns x's shape and dtype. Saves x and one number a row."""
    return call(_RMSNorm, x, weight, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """RMSNorm over the last axis, then times sigmoid(gate): KDA's output (report eq. 2, norm first, then gate).

    x and gate [..., d], weight [d]; returns x's shape and gate's dtype.
    """
    return call(_GatedRMSNorm, x, gate, weight, eps)


def _math(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last axis: x [..., d] -> [..., 1], in x's dtype."""
    return torch.rsqrt(torch.linalg.vecdot(x, x).unsqueeze_(-1).div_(x.shape[-1]).add_(eps))


def norm_backward(grad: Tensor, normal: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of normal * weight for x and weight, where normal = x * scale; `grad` is overwritten."""
    d = normal.shape[-1]
    product = grad * normal  # einsum would run these as thousands of tiny products
    grad_weight = product.reshape(-1, d).sum(0)
    inner = (product @ weight).unsqueeze_(-1).div_(d)
    grad *= weight
    return grad.addcmul_(normal, inner, value=-1).mul_(scale), grad_weight


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        math = _math(x.dtype)
        xm = x.to(math)
        scale = inverse_rms(xm, eps)
        ctx.save_for_backward(x, weight, scale)
        return (xm * scale).mul_(weight.to(math)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        math = scale.dtype
        grad_x, grad_weight = norm_backward(grad_outputs[0].to(math, copy=True), x.to(math) * scale, scale, weight.to(math))
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        math = _math(x.dtype)
        xm = x.to(math)
        scale = inverse_rms(xm, eps)
        ctx.save_for_backward(x, gate, weight, scale)
        return (xm * scale).mul_(weight.to(math)).mul_(torch.sigmoid(gate.to(math))).to(gate.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, gate, weight, scale = ctx.saved_tensors
        math = scale.dtype
        grad = grad_outputs[0].to(math, copy=True)
        normal = x.to(math) * scale
        open_ = torch.sigmoid(gate.to(math))
        weight_m = weight.to(math)
        grad_gate = (normal * weight_m).mul_(grad).mul_(open_)
        grad_gate = grad_gate.addcmul_(grad_gate, open_, value=-1)
        grad_x, grad_weight = norm_backward(grad.mul_(open_), normal, scale, weight_m)
        return grad_x.to(x.dtype), grad_gate.to(gate.dtype), grad_weight.to(weight.dtype), None
