"""Scales and elements of the MX formats, exact in every step: exponents come from the bits, never from a logarithm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32
RULES = ("rceil", "floor")
NAN_SCALE = 255  # E8M0's only special code: a block that holds NaN or infinity


@dataclass(frozen=True)
class Format:
    """`largest` = fraction * 2^exponent with fraction in [0.5, 1) is the greatest finite element."""

    largest: float
    fraction: float
    exponent: int
    least: int  # 2^least is the least normal element
    bits: int  # of a normal element's fraction
    encode: Callable[[Tensor], Tensor]  # scaled values, any float dtype -> uint8 codes
    decode: Callable[[Tensor], Tensor]  # uint8 codes -> float32 values (exact)


def power_of_two(code: Tensor) -> Tensor:
    """2^(code - 127) in float32 for codes 0..254, exactly (code 0 is subnormal), and NaN for 255."""
    code = code.to(torch.int32)
    bits = torch.where(code == 0, 1 << 22, code << 23)
    return torch.where(code == NAN_SCALE, torch.nan, bits.view(torch.float32))


def scale_codes(largest: Tensor, fmt: Format, rule: str) -> Tensor:
    """E8M0 codes (uint8) from each block's largest magnitude; 0 for a zero block."""
    fraction, exponent = torch.frexp(largest)
    if rule == "rceil":  # ceil(log2(largest / fmt.largest)): the scaled block never exceeds the greatest element
        power = exponent - fmt.exponent + (fraction > fmt.fraction)
    else:  # floor(log2(largest)) minus the element format's greatest exponent: may saturate
        power = exponent - fmt.exponent
    code = torch.where(largest == 0, 0, (power + 127).clamp(0, 254))
    return torch.where(torch.isfinite(largest), code, NAN_SCALE).to(torch.uint8)


def _encode_e2m1(x: Tensor) -> Tensor:
    """0, .5, 1, 1.5, 2, 3, 4, 6 are codes 0..7; bit 3 is the sign. `round` takes ties to even, as the codes' parity does."""
    size = x.abs().clamp(max=6)
    code = torch.where(size < 2, (size * 2).round(), torch.where(size < 4, size.round() + 2, (size / 2).round() + 4))
    return code.to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)


def _decode_e2m1(codes: Tensor) -> Tensor:
    size = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=codes.device)
    return torch.cat([size, -size])[codes.long()]


def _encode_e4m3(x: Tensor) -> Tensor:
    if x.dtype == torch.float64:  # the cast goes through float32: round to 3 fraction bits first, or it would round twice
        _, exponent = torch.frexp(x)
        step = power_of_two((exponent - 4).clamp(-9, 100) + 127).double()
        x = (x / step).round() * step
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)  # the cast does not saturate by itself


def _decode_e4m3(codes: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


FORMATS = {
    "mxfp4": Format(6.0, 0.75, 3, 0, 1, _encode_e2m1, _decode_e2m1),
    "mxfp8": Format(448.0, 0.875, 9, -6, 3, _encode_e4m3, _decode_e4m3),
}
