"""How the layers take their past from `Slots` (k3/context.py): one new token a row, or a block of them.

Every product has a shape that depends neither on a row's content nor on its neighbours, and counts rows in sixteens: below, a
CPU's products round differently (kernels/experts). Legend as in states.py, and T new tokens a row, N = R T.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from k3.generation.states import PAGE, Slots
from k3.kda import KDA
from k3.mla import MLA
from kernels.attention.latent import latent_attention
from kernels.conv import short_conv
from kernels.conv.step import conv_step
from kernels.kda import kda
from kernels.kda.step import kda_step
from kernels.precision import math_dtype


class Derived:
    """What layers compute from their weights alone; made anew whenever weights may have changed."""

    def __init__(self) -> None:
        self._made: dict[KDA | MLA, tuple[Tensor, ...]] = {}

    def kda(self, layer: KDA, math: torch.dtype) -> tuple[Tensor, ...]:
        """taps [3P, W], the same as [W, 3P] in the dtype of the computation, exp(A_log) [H, 1] and dt_bias [H, K] in it."""
        if layer not in self._made:
            taps = torch.cat([conv.weight for conv in (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d)])
            bias = layer.dt_bias.to(math).view(layer.heads, layer.head_dim)
            self._made[layer] = taps, taps.t().to(math).contiguous(), layer.A_log.to(math).exp()[:, None], bias
        return self._made[layer]

    def mla(self, layer: MLA, math: torch.dtype) -> tuple[Tensor, ...]:
        """kv_b_proj's weight as what a query is multiplied with, scaled, [H, nope, C], and a sum of latents, [H, C, V]."""
        if layer not in self._made:
            whole: Tensor = layer.kv_b_proj.weight  # type: ignore[assignment]
            weight = whole.to(math).view(layer.heads, layer.nope + layer.value, -1)
            key, value = weight.split([layer.nope, layer.value], 1)
            self._made[layer] = (key * layer.key**-0.5).contiguous(), value.transpose(1, 2).contiguous()
        return self._made[layer]


class SlotsPast:
    """The past of rows 0..R-1 of `slots`, which the `tokens` new ones of each move on.

    valid: how many of a row's new tokens are real, the rest is padding behind them; None: all of them.
    first: the places of the first new tokens; None: behind those that the rows have.
    block: what mixes tokens does so in blocks of so many, one after another, each as it would be alone; None: all at once.
    """

    def __init__(
        self,
        slots: Slots,
        derived: Derived,
        rows: int,
        tokens: int,
        valid: Sequence[int] | None = None,
        *,
        first: Sequence[int] | None = None,
        block: int | None = None,
    ):
        self.block = block or tokens
        self.kept: dict[int, tuple[Tensor, list[Tensor]]] = {}  # of each KDA layer: inputs [R, W-1 + T, 3P], states by block
        self.slots, self.derived, self.rows, self.tokens = slots, derived, rows, tokens
        device = slots.shapes.device
        length = slots.length[:rows] if first is None else first
        ragged = valid is not None and any(v != tokens for v in valid)
        self.valid = torch.tensor(valid, device=device) if ragged else None
        last = max(length) + tokens
        slots.reserve(last)
        pages = -(-last // PAGE)
        place = torch.tensor(length, device=device)[:, None] + torch.arange(tokens, device=device)  # [R, T]
        row = torch.arange(rows, device=device)[:, None]
        self.where = ((place // PAGE * slots.rows + row) * PAGE + place % PAGE).flatten()
        self.hidden = torch.arange(pages * PAGE, device=device) > place.unsqueeze(-1)
        self.pages = pages
        if self.valid is not None:
            self.padding = torch.arange(tokens, device=device) >= self.valid[:, None]  # [R, T]

    def kda(self, layer: KDA, projected: Sequence[Tensor], z: Tensor, beta_logit: Tensor) -> Tensor:
        s, r = self.slots, self.rows
        i, (h, k) = s.shapes.index[layer], (layer.heads, layer.head_dim)
        taps, taps_WC, rate, bias = self.derived.kda(layer, s.shapes.math)
        x = torch.cat(list(projected), -1)
        gate: dict[str, Any] = {"gate": layer.gate, "lower_bound": layer.lower_bound}
        if self.tokens == 1:
            x = conv_step(x.squeeze(1), taps_WC, s.inputs[i][:, :r]).view(r, 3, h, k)
            out = kda_step(x[:, :2], x[:, 2], z.view(r, h, k), beta_logit.view(r, h), rate, bias, s.recurrent[i][:r], **gate)
            return out.unsqueeze(1)
        x = x.view(r, self.tokens, -1)
        before = s.inputs[i][:, :r].transpose(0, 1)
        z, beta_logit = z.view(r, self.tokens, h, k), beta_logit.view(r, self.tokens, h)
        past = layer.q_conv1d.weight.shape[1] - 1
        inputs = torch.cat([before, x], 1)
        if self.valid is None:
            s.inputs[i][:, :r] = inputs[:, -past:].transpose(0, 1) if past else before.transpose(0, 1)
        else:
            # a padded token neither decays the state (its gate is at minus infinity) nor writes to it
            z = z.masked_fill(self.padding[:, :, None, None], -torch.inf)
            beta_logit = beta_logit.masked_fill(self.padding.unsqueeze(-1), -torch.inf)
            place = self.valid[:, None] + torch.arange(past, device=x.device)
            kept = inputs.gather(1, place.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
            s.inputs[i][:, :r] = kept.transpose(0, 1)
        state, outs, states = s.recurrent[i][:r], [], []
        for start in range(0, self.tokens, self.block):
            at = slice(start, start + self.block)
            x_at, before = x[:, at], inputs[:, start : start + past]
            q, k_, v = short_conv(x_at, taps, initial_state=before)[0].view(r, -1, 3, h, k).unbind(2)
            out, state = kda(q, k_, v, z[:, at], beta_logit[:, at], layer.A_log, bias, initial_state=state, **gate)
            outs.append(out)
            states.append(state)
        s.recurrent[i][:r] = state
        self.kept[i] = inputs, states
        return torch.cat(outs, 1).view(r * self.tokens, 1, h, k)

    def left(self, row: int, block: int) -> tuple[Tensor, Tensor]:
        """What a row's new tokens up to the end of `block`, a full one, have left: a State's `recurrent` and `inputs`."""
        empty, end = self.slots.shapes.empty(), (block + 1) * self.block
        if not self.kept:
            return empty.recurrent, empty.inputs
        layers = [self.kept[i] for i in range(len(self.kept))]
        past = empty.inputs.shape[1]
        return torch.stack([s[block][row] for _, s in layers]), torch.stack([x[row, end : end + past] for x, _ in layers])

    def mla(self, layer: MLA, query: Tensor, compressed: Tensor) -> Tensor:
        s, r, t = self.slots, self.rows, self.tokens
        pages = s.latents[s.shapes.index[layer]]
        pages.view(-1, pages.shape[-1]).index_copy_(0, self.where, compressed.squeeze(1))
        math = math_dtype(query)
        key, value = self.derived.mla(layer, math)
        q = query.to(math).view(r * t, layer.heads, layer.key)
        # the key projection of the heads, moved from all cached tokens to the query at hand
        latent_q = torch.bmm(q[..., : layer.nope].transpose(0, 1), key).transpose(0, 1)
        shared_q = q[..., layer.nope :] * layer.key**-0.5
        q = torch.cat([latent_q, shared_q], -1).view(r, t, layer.heads, -1)
        seen = [page[:r] for page in pages[: self.pages]]
        read = self._read(q, seen, layer.widths[0]).view(r * t, layer.heads, -1)
        out = torch.bmm(read.transpose(0, 1), value).transpose(0, 1)
        return out.reshape(r * t, 1, -1).to(query.dtype)

    def _read(self, q: Tensor, seen: Sequence[Tensor], width: int) -> Tensor:
        starts = range(0, self.tokens, self.block)
        spans = [slice(start, start + self.block) for start in starts]
        return torch.cat([latent_attention(q[:, at], seen, self.hidden[:, at], width) for at in spans], 1)

    def advance(self, counts: Sequence[int]) -> None:
        """After the pass through all layers: row i has `counts[i]` tokens more."""
        for row, count in enumerate(counts):
            self.slots.length[row] += count
