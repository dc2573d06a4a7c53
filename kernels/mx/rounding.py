"""The round trip through a format on a CPU, without codes: a value is rounded where it stands, by adding and subtracting a power
of two so large that the sum has no room for what the format drops.

Bit-exact with `quantise` and `dequantise`. Stretches of a tensor that fit a core's cache go through seven elementwise operations
where the two functions take over twenty and a gather.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.mx.formats import BLOCK, NAN_SCALE, Format, power_of_two, scale_codes

STRETCH = 1 << 17  # elements that one thread works on at a time: fewer would pay for calls, more for memory
# Blocks whose greatest magnitude lies outside have scales, or steps below them, near the ends of float32: left to the reference.
SMALL, LARGE = 2.0**-100, 2.0**100


def rounded(x: Tensor, fmt: Format, rule: str) -> Tensor:
    """x [..., C] on a CPU, C a multiple of 32 -> what `dequantise(*quantise(x))` gives, in x's dtype."""
    out = torch.empty(x.shape, dtype=x.dtype)
    if not out.numel():
        return out
    source, target = x.reshape(-1, BLOCK), out.view(-1, BLOCK)
    math = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = STRETCH // BLOCK * torch.get_num_threads()
    scratch = torch.empty(min(rows, len(source)), BLOCK, dtype=math)
    for given, result in zip(source.split(rows), target.split(rows)):
        wide = given.to(math)
        size = wide.abs().amax(-1)
        if not _is_plain(size):
            result.copy_(in_steps(wide, fmt, rule))
        elif x.dtype == math:
            _round(wide, size, fmt, rule, result, scratch[: len(wide)])
        else:
            result.copy_(_round(wide, size, fmt, rule, torch.empty_like(wide), scratch[: len(wide)]))
    return out


def in_steps(blocks: Tensor, fmt: Format, rule: str) -> Tensor:
    """The reference: blocks [..., 32], float32 or float64, to codes and scales and back, in float32."""
    codes, scales = encoded(blocks, fmt, rule)
    return fmt.decode(codes) * power_of_two(scales).unsqueeze(-1)


def encoded(blocks: Tensor, fmt: Format, rule: str) -> tuple[Tensor, Tensor]:
    """Codes uint8 of blocks [..., 32], float32 or float64, and scales uint8 [...]."""
    scales = scale_codes(blocks.abs().amax(-1), fmt, rule)
    # code 254 - s is the exact reciprocal of code s; a NaN block is scaled by anything, its scale says NaN
    inverse = power_of_two(254 - scales.clamp(max=254)).to(blocks.dtype)
    finite = (scales != NAN_SCALE).unsqueeze(-1)
    return fmt.encode(torch.where(finite, blocks * inverse.unsqueeze(-1), 0.0)), scales


def _is_plain(size: Tensor) -> bool:
    low, high = size.aminmax()
    if low == 0:
        low = torch.where(size == 0, LARGE, size).min()
    return bool((low >= SMALL) & (high <= LARGE))  # false where a NaN is among them


def _round(x: Tensor, size: Tensor, fmt: Format, rule: str, out: Tensor, scratch: Tensor) -> Tensor:
    """x [N, 32], the greatest magnitude of each row -> out. Adding 1.5 times a power of two keeps sums of either sign between
    two powers, where all floats are one step apart.
    """
    fraction_bits, bias, bits = (52, 1023, torch.int64) if x.dtype == torch.float64 else (23, 127, torch.int32)
    fraction, exponent = torch.frexp(size)
    power = exponent.to(bits) - fmt.exponent
    if rule == "rceil":
        power += fraction > fmt.fraction
    # below the format's least normal number all steps are equal
    least = (power + (fmt.least + bias)) << fraction_bits
    step = scratch.view(bits)
    torch.bitwise_and(x.view(bits), ((1 << (bits.itemsize * 8 - 1 - fraction_bits)) - 1) << fraction_bits, out=step)
    torch.maximum(step, least.unsqueeze(-1), out=step)
    much = 1.5 * 2.0 ** (fraction_bits - fmt.bits)  # times a power of two: exact, whatever the order of operations
    torch.add(x, scratch, alpha=much, out=out)
    out.sub_(scratch, alpha=much)
    if rule == "floor":
        most = torch.ldexp(torch.full_like(size, fmt.largest), power).unsqueeze(-1)
        torch.clamp(out, -most, most, out=out)
    return torch.copysign(out, x, out=out)  # the sum of a negative number that rounds to zero has lost its sign
