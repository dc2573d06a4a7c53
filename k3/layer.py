"""One decoder layer: attention and feed-forward, each reading what the residual scheme gives it."""

from __future__ import annotations

from torch import Tensor, nn

from k3.config import K3Config, Residual
from k3.context import Context
from k3.feed_forward import GatedMLP, LatentMoE
from k3.kda import KDA
from k3.linear import ConcatLinear, RMSNorm
from k3.mla import MLA
from k3.residual import ReadBlocks, ReadRunningSum, Rows
from parallel.megatron import TransformerConfig
from parallel.world import World


class Layer(nn.Module):
    """Rows -> Rows."""

    def __init__(self, index: int, config: K3Config, megatron: TransformerConfig, world: World):
        super().__init__()
        attnres = config.residual is Residual.attnres
        self.begins_block = attnres and index % config.residual_block == 0
        self.attention_residual = ReadBlocks(megatron) if attnres else ReadRunningSum()
        self.input_layernorm = RMSNorm(config.hidden_size, megatron)
        self.attention = (MLA if config.is_mla(index) else KDA)(config, megatron, world)
        self.feed_forward_residual = ReadBlocks(megatron) if attnres else ReadRunningSum()
        self.post_attention_layernorm = RMSNorm(config.hidden_size, megatron)
        self.feed_forward: GatedMLP | LatentMoE
        if config.is_moe(index):
            self.feed_forward = LatentMoE(config, megatron, world)
        else:
            self.feed_forward = GatedMLP(config.dense_size, config, megatron, world)

    def forward(self, rows: Rows, context: Context) -> Rows:
        out = self.attention(self.input_layernorm(self.attention_residual(rows)), context)
        rows = rows.after_attention(out, begins_block=self.begins_block)
        out = self.feed_forward(self.post_attention_layernorm(self.feed_forward_residual(rows)), context)
        return rows.after_feed_forward(out)


class MTPLayer(nn.Module):
    """One multi-token prediction layer (spec 6b): a plain-residual MLA + LatentMoE block on [next embedding; backbone state].

    state and next_embedding [T, B, d] -> (the layer's own state [T, B, d], its normed form for the shared head).
    """

    def __init__(self, config: K3Config, megatron: TransformerConfig, world: World):
        super().__init__()
        d = config.hidden_size
        self.enorm = RMSNorm(d, megatron)
        self.hnorm = RMSNorm(d, megatron)
        self.eh_proj = ConcatLinear(d, megatron)
        self.input_layernorm = RMSNorm(d, megatron)
        self.attention = MLA(config, megatron, world)
        self.post_attention_layernorm = RMSNorm(d, megatron)
        self.feed_forward: GatedMLP | LatentMoE
        if config.moe.experts:
            self.feed_forward = LatentMoE(config, megatron, world)
        else:
            self.feed_forward = GatedMLP(config.dense_size, config, megatron, world)
        self.norm = RMSNorm(d, megatron)

    def forward(self, state: Tensor, next_embedding: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        x = self.eh_proj(self.enorm(next_embedding), self.hnorm(state))
        x = x + self.attention(self.input_layernorm(x), context)
        x = x + self.feed_forward(self.post_attention_layernorm(x), context)
        return x, self.norm(x)
