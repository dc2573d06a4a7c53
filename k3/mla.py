"""Gated Multi-head Latent Attention without position encoding (report 2.1.2).

Legend: T tokens of this context rank, B rows, d hidden, H heads on this rank, N = nope + rope key width, V value width.
The "rope" part keeps the release's name and is never rotated: its key is one vector shared by all heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from k3.builder import Builder
from k3.config import K3Config
from k3.context import Context
from kernels.attention.ahead import attention_ahead
from parallel.cards import DType
from parallel.context import gather_past
from parallel.tensor import enter


class MLA(nn.Module):
    """[T / s, B, d] -> [T / s, B, d], s the tensor ranks under sequence parallelism, else 1.

    Context ranks gather the compressed latents of all earlier tokens, kv_lora_rank + rope wide, rather than keys and values.
    `max_logits` [H] keeps the largest scaled logit of each head over this rank's queries since it was last cleared.
    """

    max_logits: Tensor

    def __init__(self, config: K3Config, build: Builder):
        super().__init__()
        self.world = build.world
        c, d = config.mla, config.hidden_size
        self.heads = c.heads // self.world.groups.tp.size()
        self.nope, self.rope, self.value = c.nope_dim, c.rope_dim, c.v_dim
        self.key = c.nope_dim + c.rope_dim
        if c.q_lora_rank is None:
            self.q_proj = build.column("q_proj", d, c.heads * self.key)
        else:
            self.q_a_proj = build.duplicated("q_a_proj", d, c.q_lora_rank)
            self.q_a_layernorm = build.norm("q_a_layernorm", c.q_lora_rank)
            self.q_b_proj = build.column("q_b_proj", c.q_lora_rank, c.heads * self.key)
        self.direct_query = c.q_lora_rank is None
        # never cut over tensor ranks: the shared key would lose part of its gradient
        self.kv_a_proj_with_mqa = build.duplicated("kv_a_proj_with_mqa", d, c.kv_lora_rank + c.rope_dim)
        self.kv_a_layernorm = build.norm("kv_a_layernorm", c.kv_lora_rank)
        self.widths = [c.kv_lora_rank, c.rope_dim]  # of a token's compressed vector: latent, shared key
        self.kv_b_proj = build.column("kv_b_proj", c.kv_lora_rank, c.heads * (c.nope_dim + c.v_dim))
        self.output_gate = c.output_gate
        if c.output_gate:
            self.g_proj = build.column("g_proj", d, c.heads * c.v_dim)
        self.core_attention = build.attention("o_proj", self.heads, self.key, self.value)
        self.o_proj = build.row("o_proj", c.heads * c.v_dim, d)
        logits = torch.full((self.heads,), float("-inf"), dtype=DType.FP32.resolve(build.megatron.params_dtype))
        self.register_buffer("max_logits", logits, persistent=False)

    def forward(self, x_TBd: Tensor, context: Context) -> Tensor:
        return self.unrolled(x_TBd, context)[0]

    def unrolled(self, x_TBd: Tensor, context: Context, *earlier: Tensor) -> tuple[Tensor, Tensor]:
        """The output, and this pass's compressed latents [T, B, kv_lora_rank + rope].

        earlier: those of the passes before it, where a draft runs on its own outputs: position t of a later pass stands for a
        token behind t, and sees the first pass up to t, and of every later one, its own included, position t alone.
        """
        entered = enter(x_TBd, self.world) if self.direct_query or self.output_gate else x_TBd
        if self.direct_query:
            query = self.q_proj(entered)
        else:
            query = self.q_b_proj(enter(self.q_a_layernorm(self.q_a_proj(x_TBd)), self.world))
        latent, shared = self.kv_a_proj_with_mqa(x_TBd).split(self.widths, dim=-1)
        # the shared key enters with the latent: its gradient is the sum over the heads of all tensor ranks
        compressed = enter(torch.cat([self.kv_a_layernorm(latent), shared], dim=-1), self.world)
        if earlier:
            out_TBP = self._attend_ahead(query, (*earlier, compressed), context)
        elif context.past is None:
            out_TBP = self._attend(query, compressed, context)
        else:
            out_TBP = context.past.mla(self, query, compressed)
        if self.output_gate:
            math = torch.float64 if out_TBP.dtype == torch.float64 else torch.float32
            gate = torch.sigmoid(self.g_proj(entered).to(math))
            out_TBP = (out_TBP.to(math) * gate).to(x_TBd.dtype)
        return self.o_proj(out_TBP), compressed

    def _attend(self, query: Tensor, compressed: Tensor, context: Context) -> Tensor:
        """query [T, B, H N], compressed [T, B, kv_lora_rank + rope] -> [T, B, H V], over whole rows or stretches of them."""
        t, b, _ = query.shape
        key, value = self._keys_values(gather_past(compressed, self.world))
        out_BTHV, max_logits = self.core_attention(
            query.view(t, b, self.heads, self.key).transpose(0, 1),
            key.transpose(0, 1),
            value.transpose(0, 1),
            document_starts=context.past_starts,
        )
        return self._seen(out_BTHV, max_logits)

    def _attend_ahead(self, query: Tensor, passes: Sequence[Tensor], context: Context) -> Tensor:
        """As `_attend`, of a pass that follows others."""
        t, b, _ = query.shape
        q = query.view(t, b, self.heads, self.key).transpose(0, 1)
        key, value = (x.transpose(0, 1) for x in self._keys_values(gather_past(passes[0], self.world)))
        own = [[x.transpose(0, 1) for x in self._keys_values(latents)] for latents in passes[1:]]
        keys, values = zip(*own)
        starts = context.past_starts
        out = attention_ahead(q, key, value, keys, values, scale=self.key**-0.5, document_starts=starts)
        return self._seen(*out)

    def _keys_values(self, compressed: Tensor) -> tuple[Tensor, Tensor]:
        """compressed [T, B, kv_lora_rank + rope] -> [T, B, H, N], [T, B, H, V]."""
        latent, shared = compressed.split(self.widths, dim=-1)
        t, b, _ = latent.shape
        kv = self.kv_b_proj(latent).view(t, b, self.heads, self.nope + self.value)
        key, value = kv.split([self.nope, self.value], dim=-1)
        return torch.cat([key, shared.unsqueeze(2).expand(t, b, self.heads, self.rope)], dim=-1), value

    def _seen(self, out_BTHV: Tensor, max_logits: Tensor) -> Tensor:
        """[T, B, H V]; the largest logits are kept where they are of training."""
        b, t = out_BTHV.shape[:2]
        if self.training and torch.is_grad_enabled():
            # a maximum, so that recomputation and micro-batching change nothing
            torch.maximum(self.max_logits, max_logits.to(self.max_logits.dtype), out=self.max_logits)
        return out_BTHV.transpose(0, 1).reshape(t, b, -1)
