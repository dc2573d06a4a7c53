"""MX formats against the golden codes, bit for bit."""

import pytest
import torch

from kernels import mx
from tests.golden import vectors

NAMES = {"mxfp4": "mxfp4", "mxfp8": "mxfp8_e4m3"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", mx.RULES)
@pytest.mark.parametrize("format", sorted(NAMES))
def test_scales_and_values(format: str, rule: str, dtype: torch.dtype) -> None:
    golden = vectors.load("mx")
    codes, scales = mx.quantise(golden["x"].to(dtype), format, rule)
    name = f"{NAMES[format]}_{rule}"
    assert torch.equal(scales, golden[f"{name}_scale_e8m0"])
    assert torch.equal(mx.dequantise(codes, scales, format), golden[f"{name}_dequant"])
    assert torch.equal(mx.fake_quantise(golden["x"].to(dtype), format, rule), golden[f"{name}_dequant"].to(dtype))


def test_packed_bytes() -> None:
    golden = vectors.load("mx")
    codes, _ = mx.quantise(golden["x"], "mxfp4", "rceil")
    assert torch.equal(mx.pack_mxfp4(codes), golden["mxfp4_rceil_packed"])
    assert torch.equal(mx.unpack_mxfp4(golden["mxfp4_rceil_packed"]), codes)
