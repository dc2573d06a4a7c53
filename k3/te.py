"""The modules of a layer from Transformer Engine, each of which opens its own `te.autocast` region. Importing this needs it.

Written against the sources of Transformer Engine 2.20.2. A region spans one linear module and nothing else, so that what is out
of it (router, latent projections and norm, residual mixing, KDA's gates, embedding, head) cannot get into it, and a part that
is computed again in the backward pass computes the same. What opens no region, norms and attention, runs in the model's dtype.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import Tensor, nn
from transformer_engine.common import recipe

from k3.builder import LOCAL, Attention, GroupedMLP
from k3.low_precision import LowPrecision
from kernels import documents
from kernels.experts import grouped_mlp
from parallel.megatron import TransformerConfig
from parallel.world import World


def _undrawn(weight: Tensor) -> None:
    """Values are drawn in k3/init.py."""


def _device() -> str:
    return str(torch.get_default_device())


class TransformerEngine:
    """A `k3.builder.Provider`."""

    def __init__(self, kind: LowPrecision):
        self.grid = kind.grid
        made = recipe.MXFP8BlockScaling if kind is LowPrecision.mxfp8 else recipe.Float8BlockScaling
        self.recipe = made(fp8_format=recipe.Format.E4M3)

    def column(self, size_in: int, size_out: int, megatron: TransformerConfig, world: World) -> nn.Module:
        # `parallel.tensor.enter` gathers its input once for all that read it, and sums their gradients
        return Linear(size_in, size_out // world.groups.tp.size(), self, megatron)

    def row(self, size_in: int, size_out: int, megatron: TransformerConfig, world: World) -> nn.Module:
        group = world.groups.tp
        parallel = {"parallel_mode": "row", "tp_group": group, "tp_size": group.size()}
        return Linear(size_in, size_out, self, megatron, **parallel, sequence_parallel=world.sequence_parallel)

    def duplicated(self, size_in: int, size_out: int, megatron: TransformerConfig) -> nn.Module:
        return Linear(size_in, size_out, self, megatron)

    def norm(self, size: int, megatron: TransformerConfig) -> Any:
        return RMSNorm(size, eps=megatron.layernorm_epsilon, dtype=megatron.params_dtype, device=_device())

    def grouped(self, experts: int, width: int, size: int, megatron: TransformerConfig) -> GroupedMLP:
        return Experts(experts, width, size, self, megatron)

    def attention(self, heads: int, key: int, value: int, world: World) -> Attention:
        # its masks have no place for queries that are the last of their keys' positions, as on a later context rank
        if world.groups.cp.size() > 1:
            return LOCAL.attention(heads, key, value, world)
        return CoreAttention(heads, key, value)

    def region(self) -> AbstractContextManager[Any]:
        return te.autocast(enabled=True, recipe=self.recipe)


class _Stateless:
    """Keeps Transformer Engine's `_extra_state` out of state dicts: it is empty, as block scales live for one product."""

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


class Linear(_Stateless, te.Linear):
    """[..., in] -> [..., out]; weight [out, in], of this rank."""

    def __init__(self, size_in: int, size_out: int, provider: TransformerEngine, megatron: TransformerConfig, **parallel: Any):
        super().__init__(
            size_in, size_out, bias=False, init_method=_undrawn, params_dtype=megatron.params_dtype, device=_device(), **parallel
        )
        self.provider = provider

    def forward(self, x: Tensor) -> Tensor:
        with self.provider.region():
            return super().forward(x)


class RMSNorm(_Stateless, te.RMSNorm):
    """[..., size] -> [..., size], in the model's dtype."""


class CoreAttention(_Stateless, te.DotProductAttention):
    """As `kernels.attention.attention` with as many queries as keys, documents laid end to end.

    The largest logits come from the kernel itself, in q's dtype. Unlike the kernels here it rounds its output tile as the
    library does (report 2.1.2 keeps it in float32).
    """

    def __init__(self, heads: int, key: int, value: int):
        super().__init__(
            num_attention_heads=heads, kv_channels=(key, value), attention_dropout=0.0, qkv_format="thd",
            attn_mask_type="padding_causal", softmax_scale=key**-0.5, return_max_logit=True,
        )  # fmt: skip

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, document_starts: Tensor) -> tuple[Tensor, Tensor]:
        b, t, heads, _ = q.shape
        ends = documents.offsets(document_starts)
        out, largest = super().forward(
            *(x.reshape(b * t, *x.shape[2:]) for x in (q, k, v)),
            cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=t, max_seqlen_kv=t,
        )  # fmt: skip
        return out.view(b, t, heads, -1), largest.detach()


class _Grouped(_Stateless, te.GroupedLinear):
    """[N, in] by expert -> [N, out], with weights that are given: those of the card are one tensor [E, out, in]."""

    def __init__(self, experts: int, size_in: int, size_out: int, provider: TransformerEngine, megatron: TransformerConfig):
        super().__init__(
            experts, size_in, size_out, bias=False, init_method=_undrawn, params_dtype=megatron.params_dtype, device=_device()
        )
        self.provider = provider
        self.names = [f"weight{i}" for i in range(experts)]
        for name in self.names:
            delattr(self, name)

    def forward(self, x: Tensor, weight: Tensor, splits: list[int]) -> Tensor:
        try:
            for name, matrix in zip(self.names, weight.unbind(0)):
                setattr(self, name, matrix)  # a view: its gradient is a part of the card's
            with self.provider.region():
                return super().forward(x, splits)
        finally:
            for name in self.names:
                delattr(self, name)


class Experts(nn.Module):
    """As `kernels.experts.grouped_mlp`. Each expert's tokens are padded to the grid, which waits for their counts."""

    def __init__(self, experts: int, width: int, size: int, provider: TransformerEngine, megatron: TransformerConfig):
        super().__init__()
        self.gate_up = _Grouped(experts, width, 2 * size, provider, megatron)
        self.down = _Grouped(experts, size, width, provider, megatron)
        self.pad = te.Fp8Padding(experts, align_size=provider.grid)
        self.unpad = te.Fp8Unpadding(experts, align_size=provider.grid)

    def forward(self, x: Tensor, counts: Tensor, gate_up: Tensor, down: Tensor, activation: Any, probs: Tensor) -> Tensor:
        if not x.shape[0]:  # no product to compute; gives all weights their gradients of zero
            return grouped_mlp(x, counts, gate_up, down, activation, probs)
        sizes = counts.tolist()
        padded, splits = self.pad(x, sizes)
        scale, _ = self.pad(probs.unsqueeze(1), sizes)
        gate, up = self.gate_up(padded, gate_up, splits).chunk(2, -1)
        return self.unpad(self.down(activation(gate, up, scale=scale.squeeze(1)), down, splits), sizes)
