"""A stand-in for Transformer Engine 2.20.2 where it cannot run: the modules that we use, with its signatures, demands and
`_extra_state`, computing in torch without quantising, and a record of what was built and how every forward pass ran.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.attention.reference import attention
from kernels.mx import dequantise, quantise
from kernels.norm import rms_norm


class Format(Enum):
    E4M3 = "E4M3"
    HYBRID = "HYBRID"


@dataclass(frozen=True)
class MXFP8BlockScaling:
    fp8_format: Format = Format.HYBRID  # the library's own default is E4M3: that it is asked for shows in the record


@dataclass(frozen=True)
class Float8BlockScaling:
    fp8_format: Format = Format.HYBRID


@dataclass
class Record:
    built: list[nn.Module] = field(default_factory=list)  # kept: an id could be given out again
    settings: dict[int, dict[str, Any]] = field(default_factory=dict)
    ran: list[tuple[nn.Module, Any]] = field(default_factory=list)  # and the recipe of the region around it, or None
    quantised: list[tuple[int, ...]] = field(default_factory=list)  # shapes that quantisers got


RECORD = Record()
_regions: list[Any] = []


class autocast:
    def __init__(self, enabled: bool = True, calibrating: bool = False, recipe: Any = None, amax_reduction_group: Any = None):
        self.recipe = recipe if enabled else None

    def __enter__(self) -> autocast:
        _regions.append(self.recipe)
        return self

    def __exit__(self, *error: object) -> None:
        _regions.pop()


class _Module(nn.Module):
    def _built(self, **settings: Any) -> None:
        RECORD.built.append(self)
        RECORD.settings[id(self)] = settings

    def _runs(self) -> int:
        """Says so; the grid of the region around it, 1 without one."""
        recipe = _regions[-1] if _regions else None
        RECORD.ran.append((self, recipe))
        return {MXFP8BlockScaling: 32, Float8BlockScaling: 16}.get(type(recipe), 1)


class _Stateful(_Module):
    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("nothing of it is stored")


def _on(grid: int, *tensors: Tensor) -> None:
    for x in tensors:
        if prod(x.shape[:-1]) % grid or x.shape[-1] % grid:
            raise ValueError(f"FP8 execution requires multiples of {grid}, but got tensor with dims={list(x.shape)}")


class Linear(_Stateful):
    def __init__(
        self, in_features: int, out_features: int, sequence_parallel: bool = False, tp_group: Any = None, tp_size: int = 1,
        init_method: Any = None, bias: bool = True, params_dtype: Any = None, parallel_mode: str | None = None,
        device: str = "cuda",
    ):  # fmt: skip
        super().__init__()
        self._built(parallel_mode=parallel_mode, sequence_parallel=sequence_parallel)
        assert not bias and parallel_mode in (None, "row")
        self.tp_group, self.mode = tp_group, parallel_mode
        self.size = tp_group.size() if tp_group is not None else tp_size
        self.sequence_parallel = self.size > 1 and sequence_parallel
        cut = in_features // self.size if parallel_mode == "row" else in_features
        self.weight = nn.Parameter(torch.empty(out_features, cut, device=device, dtype=params_dtype))
        init_method(self.weight)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        from megatron.core.tensor_parallel import mappings

        if self.size > 1 and self.tp_group is None:
            raise RuntimeError("Tensor parallel group not initialized.")
        _on(self._runs(), inp, self.weight)
        out = F.linear(inp, self.weight)
        if self.mode is None:
            return out
        if self.sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(out, group=self.tp_group)
        return mappings.reduce_from_tensor_model_parallel_region(out, group=self.tp_group)


class GroupedLinear(_Stateful):
    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, init_method: Any = None, bias: bool = True,
        params_dtype: Any = None, device: str = "cuda",
    ):  # fmt: skip
        super().__init__()
        self._built(experts=num_gemms)
        assert not bias
        self.num_gemms = num_gemms
        for i in range(num_gemms):
            weight = torch.empty(out_features, in_features, device=device, dtype=params_dtype)
            self.register_parameter(f"weight{i}", nn.Parameter(weight))

    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:
        grid, weights = self._runs(), [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        parts = inp.split(m_splits)
        _on(grid, *parts, *weights)
        return torch.cat([F.linear(x, weight) for x, weight in zip(parts, weights, strict=True)])


class Fp8Padding(_Module):
    def __init__(self, num_gemms: int, align_size: int | None = None):
        super().__init__()
        self._built(align_size=align_size)
        self.align_size = align_size or 0

    def forward(self, inp: Tensor, m_splits: list[int]) -> tuple[Tensor, list[int]]:
        self._runs()
        parts = [F.pad(x, (0, 0, 0, -len(x) % self.align_size)) for x in inp.split(m_splits)]
        return torch.cat(parts), [len(x) for x in parts]


class Fp8Unpadding(Fp8Padding):
    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:  # type: ignore[override]
        self._runs()
        parts = inp.split([m + -m % self.align_size for m in m_splits])
        return torch.cat([x[:m] for x, m in zip(parts, m_splits)])


class RMSNorm(_Stateful):
    def __init__(self, normalized_shape: int, eps: float = 1e-5, dtype: Any = None, device: Any = None):
        super().__init__()
        self._built(eps=eps)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(normalized_shape, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        self._runs()
        return rms_norm(x, self.weight, eps=self.eps)


class DotProductAttention(_Stateful):
    def __init__(
        self, num_attention_heads: int, kv_channels: tuple[int, int], attention_dropout: float = 0.0, qkv_format: str = "sbhd",
        attn_mask_type: str = "causal", softmax_scale: float | None = None, return_max_logit: bool = False,
    ):  # fmt: skip
        super().__init__()
        self._built(kv_channels=kv_channels)
        assert qkv_format == "thd" and attn_mask_type == "padding_causal" and return_max_logit and not attention_dropout
        self.shape, self.scale = (num_attention_heads, *kv_channels), softmax_scale or kv_channels[0] ** -0.5

    def forward(
        self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor,
        max_seqlen_q: int, max_seqlen_kv: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        self._runs()
        assert (query_layer.shape[1], query_layer.shape[2], value_layer.shape[2]) == self.shape
        assert cu_seqlens_q.dtype == torch.int32 and int((cu_seqlens_q.diff()).max()) <= max_seqlen_q
        starts = torch.zeros(1, len(query_layer), dtype=torch.bool)
        starts[0, cu_seqlens_kv[:-1].long()] = True
        batch = (x.unsqueeze(0) for x in (query_layer, key_layer, value_layer))
        out, largest = attention(*batch, scale=self.scale, document_starts=starts)
        return out.flatten(2).squeeze(0), largest.to(out.dtype)


class DType(Enum):
    kFloat8E4M3 = 7


@dataclass(frozen=True)
class MXFP8Quantizer:
    """As the library's, called by itself: its kernel takes whole grids of contiguous rows. This one does round: as kernels/mx."""

    fp8_dtype: DType
    rowwise: bool = True
    columnwise: bool = True

    def __call__(self, tensor: Tensor) -> _Quantised:
        assert self.fp8_dtype is DType.kFloat8E4M3 and self.rowwise and not self.columnwise and tensor.is_contiguous()
        _on(32, tensor)
        RECORD.quantised.append(tuple(tensor.shape))
        return _Quantised(*quantise(tensor, "mxfp8"), tensor.dtype)


@dataclass(frozen=True)
class _Quantised:
    codes: Tensor
    scales: Tensor
    nominal: torch.dtype

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        return dequantise(self.codes, self.scales, "mxfp8", dtype or self.nominal)


@contextmanager
def installed() -> Iterator[Record]:
    """In the place of Transformer Engine, as long as it lasts; give an empty record."""
    import parallel.megatron  # noqa: F401  megatron-core looks for Transformer Engine when it is imported: not for this one

    here = sys.modules[__name__]
    recipes, pytorch, common, top = (
        ModuleType(f"transformer_engine{name}") for name in (".common.recipe", ".pytorch", ".common", "")
    )
    for name in ("Format", "MXFP8BlockScaling", "Float8BlockScaling"):
        setattr(recipes, name, getattr(here, name))
    for name in (
        "autocast", "Linear", "GroupedLinear", "Fp8Padding", "Fp8Unpadding", "RMSNorm", "DotProductAttention", "MXFP8Quantizer",
    ):  # fmt: skip
        setattr(pytorch, name, getattr(here, name))
    binding = ModuleType("transformer_engine_torch")
    binding.DType = DType  # type: ignore[attr-defined]
    common.recipe, top.pytorch, top.common = recipes, pytorch, common  # type: ignore[attr-defined]
    names = {m.__name__: m for m in (top, pytorch, common, recipes, binding)}
    before = {name: sys.modules.get(name, ...) for name in (*names, "k3.te")}
    sys.modules.update(names)
    sys.modules.pop("k3.te", None)
    RECORD.built.clear(), RECORD.settings.clear(), RECORD.ran.clear(), RECORD.quantised.clear()
    try:
        yield RECORD
    finally:
        for name, module in before.items():
            if module is ...:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module  # type: ignore[assignment]
