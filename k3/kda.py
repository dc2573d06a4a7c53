"""Kimi Delta Attention (report 2.1.1): projections, short convolutions, the recurrence, gated output norm.

Legend: T tokens, B rows, d hidden, H heads on this rank, K = V head width, P = H K.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from k3.builder import Builder
from k3.config import K3Config, OutputGate
from k3.context import Context
from kernels.conv import last_inputs, short_conv
from kernels.kda import kda
from kernels.norm import gated_rms_norm, rms_norm
from parallel.cards import DType
from parallel.context import StateLink, from_previous
from parallel.tensor import enter


class ShortConv(nn.Module):
    """One filter per channel, SiLU inside, weight [P, W] kept in float32 as the release does."""

    def __init__(self, channels: int, width: int, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width, dtype=DType.FP32.resolve(dtype)))

    def forward(self, x_TBP: Tensor, context: Context, before: Tensor | None) -> Tensor:
        """[T, B, P] -> [B, T, P] (a view of the same memory order); `before` [B, W-1, P]: the inputs of the previous stretch."""
        starts = context.document_starts
        return short_conv(x_TBP.transpose(0, 1), self.weight, document_starts=starts, initial_state=before)[0]


class KDA(nn.Module):
    """[T / s, B, d] -> [T / s, B, d], s the tensor ranks under sequence parallelism, else 1.

    Under context parallelism (KCP, report 5.1.2) a stretch continues from its predecessors through two tensors of fixed size: the
    last W-1 inputs of the convolutions, and what earlier stretches do to the recurrent state.
    """

    def __init__(self, config: K3Config, build: Builder):
        super().__init__()
        self.world = build.world
        c, d = config.kda, config.hidden_size
        self.heads = c.heads // self.world.groups.tp.size()
        self.head_dim, self.gate, self.lower_bound = c.head_dim, c.gate.value, c.lower_bound
        self.eps = config.norm_eps
        p = c.heads * c.head_dim
        local = self.heads * c.head_dim
        dtype = build.megatron.params_dtype
        fp32 = DType.FP32.resolve(dtype)
        self.q_proj = build.column("q_proj", d, p)
        self.k_proj = build.column("k_proj", d, p)
        self.v_proj = build.column("v_proj", d, p)
        self.q_conv1d = ShortConv(local, c.conv_size, dtype)
        self.k_conv1d = ShortConv(local, c.conv_size, dtype)
        self.v_conv1d = ShortConv(local, c.conv_size, dtype)
        self.f_a_proj = build.duplicated("f_a_proj", d, c.head_dim)
        self.f_b_proj = build.column("f_b_proj", c.head_dim, p)
        self.b_proj = build.column("b_proj", d, c.heads)
        self.A_log = nn.Parameter(torch.empty(self.heads, dtype=fp32))
        self.dt_bias = nn.Parameter(torch.empty(local, dtype=fp32))
        self.output_gate = c.output_gate
        if c.output_gate is OutputGate.full:
            self.g_proj = build.column("g_proj", d, p)
        elif c.output_gate is OutputGate.low_rank:
            self.g_a_proj = build.duplicated("g_a_proj", d, c.head_dim)
            self.g_b_proj = build.column("g_b_proj", c.head_dim, p)
        self.o_norm = nn.ParameterDict({"weight": nn.Parameter(torch.empty(c.head_dim, dtype=fp32))})
        self.o_proj = build.row("o_proj", p, d)

    def forward(self, x_TBd: Tensor, context: Context) -> Tensor:
        x_TBd = enter(x_TBd, self.world)
        t, b, _ = x_TBd.shape
        projected = (self.q_proj(x_TBd), self.k_proj(x_TBd), self.v_proj(x_TBd))
        z, beta_logit = self.f_b_proj(self.f_a_proj(x_TBd)), self.b_proj(x_TBd)
        if context.past is None:
            out_TBHV = self._attend(projected, z, beta_logit, context)
        else:
            out_TBHV = context.past.kda(self, projected, z, beta_logit)
        weight = self.o_norm["weight"]
        if self.output_gate is OutputGate.none:
            out = rms_norm(out_TBHV, weight, eps=self.eps).to(x_TBd.dtype)
        else:
            gate = self.g_proj(x_TBd) if self.output_gate is OutputGate.full else self.g_b_proj(self.g_a_proj(x_TBd))
            out = gated_rms_norm(out_TBHV, gate.view(out_TBHV.shape), weight, eps=self.eps)
        return self.o_proj(out.reshape(t, b, -1))

    def _attend(self, projected: Sequence[Tensor], z: Tensor, beta_logit: Tensor, context: Context) -> Tensor:
        """q, k, v, z [T, B, P], beta_logit [T, B, H] -> [T, B, H, V], over whole rows or context ranks' stretches of them."""
        t, b, _ = z.shape
        by_head = (b, t, self.heads, self.head_dim)
        before = self._inputs_before(projected, context)
        convolutions = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        q, k, v = (conv(x, context, past).view(by_head) for conv, x, past in zip(convolutions, projected, before))
        z_BTHK = z.transpose(0, 1).view(by_head)
        decay = (z_BTHK, beta_logit.transpose(0, 1), self.A_log, self.dt_bias.view(self.heads, self.head_dim))
        shared: dict[str, Any] = {"gate": self.gate, "lower_bound": self.lower_bound, "document_starts": context.document_starts}
        link = StateLink(self.world) if self.world.groups.cp.size() > 1 else None
        return kda(q, k, v, *decay, link=link, **shared)[0].transpose(0, 1)

    def _inputs_before(self, projected: Sequence[Tensor], context: Context) -> Sequence[Tensor | None]:
        """For each convolution its inputs just before this stretch, [B, W-1, P], in one exchange; None without context ranks."""
        width = self.q_conv1d.weight.shape[1]
        if self.world.groups.cp.size() == 1 or width == 1:
            return [None] * len(projected)
        inputs = torch.cat([x[1 - width :] for x in projected], -1).transpose(0, 1)
        starts = context.document_starts[:, 1 - width :]
        return from_previous(last_inputs(inputs, width - 1, starts, None), self.world).chunk(len(projected), -1)
