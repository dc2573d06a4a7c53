"""The round trip through MXFP8 by Transformer Engine's own quantiser, which its products on Blackwell use, too.

Written against the sources of Transformer Engine 2.20; it has run nowhere yet. Its scale comes from the greatest magnitude times
1/448 in float32, which is rounded: a block whose greatest magnitude is 448 times a power of two, or next to it, may get the next
scale.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

GRID = 32  # its kernel takes multiples of it, rows as well as columns


def refuses(x: Tensor, format: str, rule: str) -> str | None:
    if x.device.type != "cuda":
        return f"the tensor is on {x.device.type}"
    if format != "mxfp8":
        return f"has no {format}"
    if rule != "rceil":
        return f"rounds scales up, and the rule is {rule}"
    if x.dtype not in (torch.bfloat16, torch.float32):
        return f"{x.dtype}"
    return _missing(x.device.index or 0)


@cache
def _missing(device: int) -> str | None:
    major, minor = torch.cuda.get_device_capability(device)
    if major != 10:
        return f"compute capability {major}.{minor} is not Blackwell's 10.x"
    try:
        import transformer_engine.pytorch as te
    except Exception as error:  # a build for other libraries raises others than ImportError
        return f"cannot be imported ({type(error).__name__}: {error})"
    able, why = te.is_mxfp8_available(return_reason=True)
    return None if able else str(why)


def rounded(x: Tensor, format: str, rule: str) -> Tensor:
    """x [..., C] -> the same, rounded to MXFP8 E4M3. Rows are padded with zeros to the kernel's grid."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch import MXFP8Quantizer

    rows = x.reshape(-1, x.shape[-1])
    if not rows.numel():
        return torch.empty_like(x)
    quantiser = MXFP8Quantizer(fp8_dtype=tex.DType.kFloat8E4M3, rowwise=True, columnwise=False)
    padded = F.pad(rows, (0, 0, 0, -len(rows) % GRID)).contiguous()
    return quantiser(padded).dequantize(dtype=x.dtype)[: len(rows)].reshape(x.shape)
