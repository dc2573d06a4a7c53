"""Tensors to MX codes and back, and the round trip with a straight-through gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.dispatch import Backend, choose
from kernels.mx import library, rounding
from kernels.mx.formats import BLOCK, FORMATS, RULES, Format, power_of_two
from kernels.mx.rounding import encoded


def quantise(x: Tensor, format: str, rule: str = "rceil") -> tuple[Tensor, Tensor]:
    """x [..., C] of any float dtype -> (codes uint8 [..., C], one a byte; scales uint8 E8M0 [..., C / 32]).

    Elements round to nearest, ties to even, and saturate. A zero block has scale code 0; one that holds NaN or infinity has
    255 and dequantises to NaN. rule: "rceil" (scale rounded up: never saturates) or "floor" (the OCP text: may saturate).
    Raises ValueError for a last axis that is no multiple of 32, or an unknown format or rule.
    """
    fmt = _look_up(format)
    _check_rule(rule)
    codes, scales = encoded(_wide_blocks(x), fmt, rule)
    return codes.view(x.shape), scales


def requantise(x: Tensor, format: str, kept: Tensor | None = None, rule: str = "rceil") -> tuple[Tensor, Tensor]:
    """As `quantise`, but a block that is exact under its scale in `kept` (uint8 [..., C / 32]) keeps that scale.

    Values do not tell their scale: a block whose greatest element was 3, 2 or less fits under a smaller scale, too, and zeros
    under any. With the scales that values came with, codes come back bit for bit, the sign of zero included.
    """
    codes, scales = quantise(x, format, rule)
    if kept is None:
        return codes, scales
    if kept.shape != scales.shape:
        raise ValueError(f"kept scales of shape {tuple(kept.shape)} do not fit {tuple(x.shape)}: one per {BLOCK}")
    fmt = _look_up(format)
    blocks = _wide_blocks(x)
    inverse = power_of_two(254 - kept.clamp(max=254)).to(blocks.dtype)
    other = fmt.encode(blocks * inverse.unsqueeze(-1))
    back = fmt.decode(other).to(blocks.dtype) * power_of_two(kept).to(blocks.dtype).unsqueeze(-1)
    exact = (back == blocks).all(-1)  # never under the scale that says NaN
    scales = torch.where(exact, kept, scales)
    return torch.where(exact.unsqueeze(-1), other, codes.view(other.shape)).view(x.shape), scales


def dequantise(codes: Tensor, scales: Tensor, format: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """The inverse map: codes uint8 [..., C] and scales uint8 [..., C / 32] -> [..., C] in `dtype`."""
    fmt = _look_up(format)
    blocks = _in_blocks(codes)
    if scales.shape != blocks.shape[:-1]:
        raise ValueError(f"scales of shape {tuple(scales.shape)} do not fit codes of shape {tuple(codes.shape)}: one per 32")
    values = fmt.decode(blocks) * power_of_two(scales).unsqueeze(-1)
    return values.to(dtype).view(codes.shape)


def pack_mxfp4(codes: Tensor) -> Tensor:
    """Two 4-bit codes a byte, [..., C] -> [..., C / 2]: the even column in the low nibble (the released layout)."""
    if codes.shape[-1] % 2:
        raise ValueError(f"codes of shape {tuple(codes.shape)} need an even last axis to be packed")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_mxfp4(packed: Tensor) -> Tensor:
    """[..., C / 2] bytes -> [..., C] codes of 4 bits."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def fake_quantise(x: Tensor, format: str, rule: str = "rceil", *, backend: str | None = None) -> Tensor:
    """x [..., C] rounded to what the format can hold, in x's shape and dtype; its gradient passes straight through to x.

    Equals `dequantise(*quantise(x, format, rule), format, x.dtype)` bit for bit, but for the library's backend
    (kernels/mx/library.py). `backend` forces one of BACKENDS by name. Raises ValueError as `quantise` does.
    """
    return straight_through(x, lambda: round_trip(x, format, rule, backend=backend))


def round_trip(x: Tensor, format: str, rule: str = "rceil", *, backend: str | None = None) -> Tensor:
    """`fake_quantise` without gradients."""
    _look_up(format)
    _check_rule(rule)
    _check_blocks(x)
    return choose(f"round trip through {format}", BACKENDS, x, format, rule, only=backend).run(x, format, rule)


def straight_through(x: Tensor, value: Callable[[], Tensor]) -> Tensor:
    """`value()`, of x's shape and dtype and computed without gradients, whose gradient is x's."""
    return _StraightThrough.apply(x, value)


class _StraightThrough(torch.autograd.Function):
    # x + (q - x).detach() would round once more in bf16, so that the value would not be on the grid
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Callable[[], Tensor]) -> Tensor:
        out = value()
        return out.view_as(out)  # another tensor: who keeps the value must not find it inside this graph

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None]:
        return grads[0], None


def _by_bits(x: Tensor, format: str, rule: str) -> Tensor:
    return rounding.rounded(x, FORMATS[format], rule)


def _by_codes(x: Tensor, format: str, rule: str) -> Tensor:
    codes, scales = quantise(x, format, rule)
    return dequantise(codes, scales, format, x.dtype)


BACKENDS = (
    Backend("Transformer Engine", library.rounded, library.refuses),
    Backend("rounding in place", _by_bits, lambda x, *_: None if x.device.type == "cpu" else f"the tensor is on {x.device.type}"),
    Backend("codes and back", _by_codes),
)


def _check_rule(rule: str) -> None:
    if rule not in RULES:
        raise ValueError(f"rule={rule!r} is unknown; use one of {', '.join(RULES)}")


def _wide_blocks(x: Tensor) -> Tensor:
    return _in_blocks(x).to(torch.float64 if x.dtype == torch.float64 else torch.float32)


def _look_up(format: str) -> Format:
    if format not in FORMATS:
        raise ValueError(f"format={format!r} is unknown; use one of {', '.join(FORMATS)}")
    return FORMATS[format]


def _check_blocks(x: Tensor) -> None:
    if x.dim() == 0 or x.shape[-1] % BLOCK:
        raise ValueError(f"a tensor of shape {tuple(x.shape)} needs a last axis that is a multiple of {BLOCK}")


def _in_blocks(x: Tensor) -> Tensor:
    _check_blocks(x)
    return x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
