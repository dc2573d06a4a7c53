"""OCP microscaling formats: blocks of 32 elements that share a power-of-two scale (report 4.1.1, 4.1.4; used in QAT only).

`mxfp4` has E2M1 elements, `mxfp8` E4M3; scales are E8M0, 2^(code - 127). Blocks lie along the last (reduction) axis.
"""

from kernels.mx.formats import BLOCK, FORMATS, RULES
from kernels.mx.quantise import (
    dequantise,
    fake_quantise,
    pack_mxfp4,
    quantise,
    requantise,
    round_trip,
    straight_through,
    unpack_mxfp4,
)

__all__ = [
    "BLOCK", "FORMATS", "RULES", "dequantise", "fake_quantise", "pack_mxfp4", "quantise", "requantise", "round_trip",
    "straight_through", "unpack_mxfp4",
]  # fmt: skip
