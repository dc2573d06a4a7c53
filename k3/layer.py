"""One decoder layer: attention and feed-forward, each reading what the residual scheme gives it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from k3.activations import ActivationConfig
from k3.builder import Builder
from k3.config import K3Config, Residual
from k3.context import Context
from k3.feed_forward import GatedMLP, LatentMoE
from k3.kda import KDA
from k3.linear import ConcatLinear
from k3.mla import MLA
from k3.recompute import saving
from k3.residual import ReadBlocks, ReadRunningSum, Rows


class Layer(nn.Module):
    """Rows -> Rows."""

    def __init__(self, index: int, config: K3Config, build: Builder, activations: ActivationConfig):
        super().__init__()
        self.activations = activations.effective()
        attnres = config.residual is Residual.attnres
        self.begins_block = attnres and index % config.residual_block == 0
        self.attention_residual = ReadBlocks(build.megatron) if attnres else ReadRunningSum()
        self.input_layernorm = build.norm("input_layernorm", config.hidden_size)
        self.attention = (MLA if config.is_mla(index) else KDA)(config, build.at("attention"))
        self.feed_forward_residual = ReadBlocks(build.megatron) if attnres else ReadRunningSum()
        self.post_attention_layernorm = build.norm("post_attention_layernorm", config.hidden_size)
        self.feed_forward: GatedMLP | LatentMoE
        if config.is_moe(index):
            self.feed_forward = LatentMoE(config, build.at("feed_forward"))
        else:
            self.feed_forward = GatedMLP(config.dense_size, config, build.at("feed_forward"))

    def forward(self, rows: Rows, context: Context) -> Rows:
        return saving(self.activations.layer, self._both, context, *rows.tensors)

    def _both(self, context: Context, *tensors: Tensor) -> Rows:
        rows = Rows.of(*tensors)
        out = saving(self.activations.attention, self._attention, context, *rows.tensors)
        rows = rows.after_attention(out, begins_block=self.begins_block)
        out = saving(self.activations.feed_forward, self._feed_forward, context, *rows.tensors)
        return rows.after_feed_forward(out)

    def _attention(self, context: Context, *tensors: Tensor) -> Tensor:
        return self.attention(self.attention_residual(Rows.of(*tensors), self.input_layernorm), context)

    def _feed_forward(self, context: Context, *tensors: Tensor) -> Tensor:
        return self.feed_forward(self.feed_forward_residual(Rows.of(*tensors), self.post_attention_layernorm), context)


class MTPLayer(nn.Module):
    """One multi-token prediction layer (spec 6b): a plain-residual MLA + LatentMoE block on [next embedding; backbone state].

    state and next_embedding [T, B, d] -> the layer's own state [T, B, d]; `norm` is what the shared head reads it through.
    """

    def __init__(self, config: K3Config, build: Builder, activations: ActivationConfig):
        super().__init__()
        self.activations = activations.effective()
        d = config.hidden_size
        self.blocks = config.draft_blocks
        if config.draft:
            self.draft_proj = ConcatLinear(d, build.megatron, 1 + len(self.blocks))
        self.enorm = build.norm("enorm", d)
        self.hnorm = build.norm("hnorm", d)
        self.eh_proj = ConcatLinear(d, build.megatron)
        self.input_layernorm = build.norm("input_layernorm", d)
        self.attention = MLA(config, build.at("attention"))
        self.post_attention_layernorm = build.norm("post_attention_layernorm", d)
        self.feed_forward: GatedMLP | LatentMoE
        if config.moe.experts:
            self.feed_forward = LatentMoE(config, build.at("feed_forward"))
        else:
            self.feed_forward = GatedMLP(config.dense_size, config, build.at("feed_forward"))
        self.norm = build.norm("norm", d)

    def read(self, state: Tensor, bank: Sequence[Tensor]) -> Tensor:
        """What the layer takes as the backbone's state: as a draft, blocks of the bank and the state through its own matrix."""
        return self.draft_proj(*(bank[i] for i in self.blocks), state) if hasattr(self, "draft_proj") else state

    def forward(self, state: Tensor, next_embedding: Tensor, context: Context) -> Tensor:
        return saving(self.activations.layer, self._whole, context, state, next_embedding)

    def _whole(self, context: Context, state: Tensor, next_embedding: Tensor) -> Tensor:
        x = self.eh_proj(self.enorm(next_embedding), self.hnorm(state))
        x = x + saving(self.activations.attention, self._attention, context, x)
        return x + saving(self.activations.feed_forward, self._feed_forward, context, x)

    def _attention(self, context: Context, x: Tensor) -> Tensor:
        return self.attention(self.input_layernorm(x), context)

    def unrolled(self, state: Tensor, next_embedding: Tensor, context: Context, *earlier: Tensor) -> tuple[Tensor, Tensor]:
        """One step more on the layer's own outputs: its state, and the latents that later steps find in `earlier` (k3/mla.py)."""
        return saving(self.activations.layer, self._step, context, state, next_embedding, *earlier)

    def _step(self, context: Context, state: Tensor, next_embedding: Tensor, *earlier: Tensor) -> tuple[Tensor, Tensor]:
        x = self.eh_proj(self.enorm(next_embedding), self.hnorm(state))
        out, latents = saving(self.activations.attention, self._attention_ahead, context, x, *earlier)
        x = x + out
        return x + saving(self.activations.feed_forward, self._feed_forward, context, x), latents

    def _attention_ahead(self, context: Context, x: Tensor, *earlier: Tensor) -> tuple[Tensor, Tensor]:
        return self.attention.unrolled(self.input_layernorm(x), context, *earlier)

    def _feed_forward(self, context: Context, x: Tensor) -> Tensor:
        return self.feed_forward(self.post_attention_layernorm(x), context)
