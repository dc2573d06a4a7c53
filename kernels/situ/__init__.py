"""Gated activations of every feed-forward part: SiTU-GLU (report 2.3, equation 12) and its off switch SwiGLU."""

from __future__ import annotations

from torch import Tensor

from kernels.no_grad import call
from kernels.situ.fused import GatedUnit, Situ, Swiglu


def situ_glu(gate: Tensor, up: Tensor, *, beta: float = 4.0, linear_beta: float = 25.0, scale: Tensor | None = None) -> Tensor:
    """beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta) [* scale].

    gate, up: [..., f], slices of one fused tensor welcome (the last axis of each is best contiguous). scale: [...], for example
    routing weights, or None. Returns [..., f] in gate's dtype; the math is float32 (float64 for float64 input). The result lies
    within beta * linear_beta (100) of zero for |scale| <= 1. Only the inputs are kept for the backward pass.
    Raises ValueError for shapes that differ or betas that are not positive.
    """
    if beta <= 0 or linear_beta <= 0:
        raise ValueError(f"situ_glu: beta={beta}, linear_beta={linear_beta}; both must be positive (the report has 4 and 25)")
    _check("situ_glu", gate, up, scale)
    return call(GatedUnit, Situ(beta, linear_beta), gate, up, scale)


def swiglu(gate: Tensor, up: Tensor, *, scale: Tensor | None = None) -> Tensor:
    """silu(gate) * up [* scale]; shapes, dtypes and errors as `situ_glu`. The limit of SiTU-GLU for large betas."""
    _check("swiglu", gate, up, scale)
    return call(GatedUnit, Swiglu(), gate, up, scale)


def _check(name: str, gate: Tensor, up: Tensor, scale: Tensor | None) -> None:
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.dim() == 0:
        raise ValueError(
            f"{name}: gate is {gate.dtype} {tuple(gate.shape)}, up is {up.dtype} {tuple(up.shape)}; give both one dtype and shape"
        )
    if scale is not None and scale.shape != gate.shape[:-1]:
        raise ValueError(f"{name}: scale has shape {tuple(scale.shape)}; give one number a token, {tuple(gate.shape[:-1])}")
