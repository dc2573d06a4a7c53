"""KDA in chunks: plain torch products, forward and a hand-written backward pass (spec 2.5). The fast path on a CPU.

With rows, ends, decay, a_q, a_k of a chunk from `tiles` and b = beta,
    L = b a_k      X = (I + L)^-1      W = X b rows_k      U = X b V
    values = U - W S_in      S_out = decay S_in + ends^T values      O = rows_q S_in + a_q values
The serial part is two products of [C, K] with [K, V] a chunk. All else is done for a group of chunks at a time that fits the
cache. Saved for the backward pass are the inputs, the states at chunk borders and X; everything else is computed again.

Dimensions: B rows, T tokens, H heads, K key and V value channels, C tokens in a chunk, G chunks in a row, N = B H, P = g B H for
the g chunks of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.kda import tiles
from kernels.kda.gate import log_decay, log_decay_backward
from kernels.kda.inverse import unit_lower_inverse
from kernels.kda.layout import Layout, Segments, segments
from kernels.kda.linked import Link
from kernels.kda.reference import NORM_EPS
from kernels.no_grad import call

CHUNK = 64


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta_logit: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    gate: str = "bounded",
    lower_bound: float = -5.0,
    initial_state: Tensor | None = None,
    document_starts: Tensor | None = None,
    link: Link | None = None,
) -> tuple[Tensor, Tensor]:
    """As `kernels.kda.kda`."""
    layout = Layout.of(q, v, CHUNK)
    continues = initial_state is not None or link is not None
    cuts, fresh_B = segments(document_starts, layout, continues=continues, device=q.device)
    plan = _Plan(layout, cuts, fresh_B, gate, lower_bound, link)
    return call(_Chunked, q, k, v, z, beta_logit, A_log, dt_bias, initial_state, plan)


@dataclass(frozen=True)
class _Plan:
    """What does not carry gradients."""

    layout: Layout
    cuts: Segments | None
    fresh_B: Tensor  # rows that ignore the initial state
    gate: str
    lower_bound: float
    link: Link | None


class _Inputs:
    """The inputs as [G, B, H, C, D] views, and what both passes derive from them for one group of chunks."""

    def __init__(
        self, plan: _Plan, q: Tensor, k: Tensor, v: Tensor, z: Tensor, beta_logit: Tensor, A_log: Tensor, dt_bias: Tensor
    ):
        self.plan, math = plan, plan.layout.math
        view = plan.layout.view
        self.q, self.k, self.v, self.z, self.beta_logit = view(q), view(k), view(v), view(z), view(beta_logit[..., None])
        self.square = 1 / q.shape[-1]  # of the length that q is brought to
        self.q_rate, self.k_rate = (
            view(scale * torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=math).square_() + NORM_EPS))
            for x, scale in ((q, self.square**0.5), (k, 1.0))
        )
        # one row a head, as a factor of [g, B, H, C, K]
        self.rate = A_log.to(math).exp()[:, None, None]
        self.bias = dt_bias.to(math)[:, None]

    def group(self, where: slice) -> _Group:
        layout, cuts = self.plan.layout, self.plan.cuts
        q, k = layout.pack(self.q[where], self.q_rate[where]), layout.pack(self.k[where], self.k_rate[where])
        z = layout.pack(self.z[where]).view(self.z[where].shape)
        g = log_decay(z, self.rate, self.bias, gate=self.plan.gate, lower_bound=self.plan.lower_bound).flatten(0, 2)
        layout.clear_padding(g, where)  # a padded token must leave the state as it is
        beta = torch.sigmoid(layout.pack(self.beta_logit[where]))
        made = tiles.forward(q, k, g, dense=self.plan.gate == "bounded")
        if cuts is not None:
            cut = cuts[where]
            cut.same(made.a_q)
            cut.same(made.a_k)
            made.rows_q, made.rows_k = cut.before_first(made.rows_q), cut.before_first(made.rows_k)
            made.ends, made.decay = cut.of_last(made.ends), cut.uncut(made.decay)
        return _Group(made, layout.pack(self.v[where]), z, g, beta)


class _Linear:
    """How everything depends on an incoming state S that is not known yet: the state after chunk c is states[c + 1] +
    maps[c + 1] S, the output of a token is what it is from a zero state + reads S.
    """

    def __init__(self, plan: _Plan, q: Tensor, states: Tensor):
        self.layout = plan.layout
        width = q.shape[-1]
        self.maps = states.new_zeros(plan.layout.chunks + 1, plan.layout.n, width, width)
        one = torch.eye(width, dtype=states.dtype, device=states.device)
        self.maps[0].view(plan.layout.batch, -1, width, width).copy_(one * ~plan.fresh_B[:, None, None, None])
        self.reads, self._view = plan.layout.like(q, plan.layout.math)  # [B, T, H, K]

    def follow(self, where: slice, t: tiles.Tiles, w: Tensor) -> None:
        """Takes the chunks `where`; w [P, C, K]."""
        w_g, ends_g, decay_g = (x.unflatten(0, (-1, self.layout.n)) for x in (w, t.ends, t.decay))
        for i, c in enumerate(range(where.start, where.stop)):
            torch.mul(self.maps[c], decay_g[i, :, :, None], out=self.maps[c + 1])
            self.maps[c + 1].baddbmm_(ends_g[i].transpose(1, 2), torch.bmm(w_g[i], self.maps[c]), alpha=-1)
        rows = torch.baddbmm(t.rows_q, t.a_q, w, alpha=-1)
        self._view[where].copy_(torch.bmm(rows, self.maps[where].flatten(0, 1)).view(self._view[where].shape))

    def add(self, incoming: Tensor, out: Tensor, states: Tensor) -> None:
        """Adds to `out` [B, T, H, V] and `states` what the incoming state [B, H, K, V] makes of them, in place."""
        out += torch.einsum("bthk,bhkv->bthv", self.reads, incoming)
        states += self.maps @ incoming.reshape(states.shape[1:])


@dataclass
class _Group:
    tiles: tiles.Tiles
    v: Tensor  # [P, C, V]
    z: Tensor  # [g, B, H, C, K]
    g: Tensor  # [P, C, K]
    beta: Tensor  # [P, C, 1]

    def w_u(self, inverse: Tensor) -> tuple[Tensor, Tensor]:
        """W [P, C, K] and U [P, C, V]."""
        weighted = inverse * self.beta.transpose(1, 2)
        return torch.bmm(weighted, self.tiles.rows_k), torch.bmm(weighted, self.v)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, z, beta_logit, A_log, dt_bias, initial_state, plan: _Plan):
        layout = plan.layout
        inputs = _Inputs(plan, q, k, v, z, beta_logit, A_log, dt_bias)
        states = q.new_empty(layout.chunks + 1, layout.n, q.shape[-1], v.shape[-1], dtype=layout.math)
        inverses = states.new_empty(layout.chunks, layout.n, layout.size, layout.size)
        if initial_state is None:
            states[0].zero_()
        else:
            torch.mul(initial_state, ~plan.fresh_B[:, None, None, None], out=states[0].view(initial_state.shape))
        linear = None if plan.link is None else _Linear(plan, q, states)
        out, out_view = layout.like(v, q.dtype if linear is None else layout.math)
        for where in layout.groups():
            group = inputs.group(where)
            t = group.tiles
            inverse = unit_lower_inverse(t.a_k * group.beta)
            inverses[where].view_as(inverse).copy_(inverse)
            w, values = group.w_u(inverse)
            w_g, values_g, ends_g, decay_g = (x.unflatten(0, (-1, layout.n)) for x in (w, values, t.ends, t.decay))
            for i, c in enumerate(range(where.start, where.stop)):
                values_g[i].baddbmm_(w_g[i], states[c], alpha=-1)
                torch.mul(states[c], decay_g[i, :, :, None], out=states[c + 1])
                states[c + 1].baddbmm_(ends_g[i].transpose(1, 2), values_g[i])
            o = torch.bmm(t.rows_q, states[where].flatten(0, 1)).baddbmm_(t.a_q, values)
            out_view[where].copy_(o.view(out_view[where].shape))
            if linear is not None:
                linear.follow(where, t, w)
        reads = None
        if linear is not None:
            assert plan.link is not None
            fragment = torch.cat([linear.maps[-1], states[-1]], -1)
            incoming = plan.link.incoming(fragment.view(layout.batch, layout.heads, *fragment.shape[1:]))
            reads = linear.reads
            linear.add(incoming, out, states)
            out = out.to(q.dtype)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, z, beta_logit, A_log, dt_bias, initial_state, states[:-1], inverses, reads)
        ctx.plan = plan
        return out, states[-1].view(layout.batch, layout.heads, *states.shape[-2:]).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_final: Tensor | None):
        q, k, v, z, beta_logit, A_log, dt_bias, initial_state, states, inverses, reads = ctx.saved_tensors
        plan: _Plan = ctx.plan
        layout = plan.layout
        inputs = _Inputs(plan, q, k, v, z, beta_logit, A_log, dt_bias)
        d_out_view = layout.view(torch.zeros_like(v) if d_out is None else d_out)
        (dq, dq_view), (dk, dk_view), (dv, dv_view), (dz, dz_view) = (layout.like(x) for x in (q, k, v, z))
        d_beta, d_beta_view = layout.like(beta_logit[..., None])
        d_rate, d_bias = inputs.rate.new_zeros(layout.heads), torch.zeros_like(inputs.bias[:, 0])
        d_state = states.new_zeros(states.shape[1:]) if d_final is None else d_final.to(layout.math).reshape(states.shape[1:])
        if reads is not None and plan.link is not None:
            # what the outputs here want of the incoming state goes to earlier stretches; what later ones want of ours comes back
            wanted = 0 if d_out is None else torch.einsum("bthk,bthv->bhkv", reads, d_out.to(layout.math))
            wanted = wanted + states.new_zeros(layout.batch, layout.heads, *states.shape[-2:])
            d_state = d_state + plan.link.gradient(wanted).reshape(d_state.shape)
        d_states = states.new_empty(min(layout.group, layout.chunks), *states.shape[1:])  # of a group: after each of its chunks

        for where in reversed(layout.groups()):
            group = inputs.group(where)
            t, beta, inverse, before = group.tiles, group.beta, inverses[where].flatten(0, 1), states[where].flatten(0, 1)
            w, u = group.w_u(inverse)
            values = torch.baddbmm(u, w, before, alpha=-1)
            d_o = layout.pack(d_out_view[where])

            # serially: the state's gradient, from the last chunk to the first
            d_values = torch.bmm(t.a_q.transpose(1, 2), d_o)
            own = torch.bmm(t.rows_q.transpose(1, 2), d_o)
            each = (own, d_values, w, t.ends, t.decay)
            own_g, d_values_g, w_g, ends_g, decay_g = (x.unflatten(0, (-1, layout.n)) for x in each)
            for i in reversed(range(len(own_g))):
                d_states[i].copy_(d_state)
                d_values_g[i].baddbmm_(ends_g[i], d_states[i])
                d_state = own_g[i].addcmul_(d_states[i], decay_g[i, :, :, None])
                d_state.baddbmm_(w_g[i].transpose(1, 2), d_values_g[i], alpha=-1)
            after = d_states[: len(own_g)].flatten(0, 1)

            d_rows_q = torch.bmm(d_o, before.transpose(1, 2))
            d_a_q = torch.bmm(d_o, values.transpose(1, 2)).mul_(tiles.ones_below(layout.size, values))
            d_ends = torch.bmm(values, after.transpose(1, 2))
            d_decay = (before * after).sum(-1)
            # through W and U to b rows_k, b V and L
            d_w = torch.bmm(d_values, before.transpose(1, 2)).neg_()
            d_x, d_y = torch.bmm(inverse.transpose(1, 2), d_w), torch.bmm(inverse.transpose(1, 2), d_values)
            d_lower = torch.bmm(d_x, w.transpose(1, 2)).baddbmm_(d_y, u.transpose(1, 2))
            d_lower.mul_(tiles.ones_below(layout.size, values, diagonal=-1).neg_())
            d_logit = (d_x * t.rows_k).sum(-1).add_((d_y * group.v).sum(-1)).add_((d_lower * t.a_k).sum(-1))[..., None]
            d_logit.mul_(beta).mul_(1 - beta)
            d_rows_k, d_v, d_a_k = d_x.mul_(beta), d_y.mul_(beta), d_lower.mul_(beta)
            if plan.cuts is not None:
                cut = plan.cuts[where]
                cut.same(d_a_q)
                cut.same(d_a_k)
                d_rows_q, d_rows_k, d_ends = cut.before_first(d_rows_q), cut.before_first(d_rows_k), cut.of_last(d_ends)

            d_q, d_k, d_g = tiles.backward(t, d_rows_q, d_rows_k, d_ends, d_decay, d_a_q, d_a_k)
            layout.clear_padding(d_g, where)
            d_g, g = d_g.view_as(group.z), group.g.view_as(group.z)
            d_z, d_log_rate = log_decay_backward(d_g, g, group.z, inputs.rate, inputs.bias, gate=plan.gate)
            d_rate += d_log_rate.sum((0, 1, 3, 4))
            d_bias += d_z.sum((0, 1, 3))
            _through_norm(d_q, t.q, inputs.square, inputs.q_rate[where], dq_view[where])
            _through_norm(d_k, t.k, 1.0, inputs.k_rate[where], dk_view[where])
            for value, view in ((d_v, dv_view), (d_z, dz_view), (d_logit, d_beta_view)):
                view[where].copy_(value.view(view[where].shape))

        d_initial = None
        if initial_state is not None:
            d_initial = (d_state.view(initial_state.shape) * ~plan.fresh_B[:, None, None, None]).to(initial_state.dtype)
        return dq, dk, dv, dz, d_beta.squeeze(-1), d_rate.to(A_log.dtype), d_bias.to(dt_bias.dtype), d_initial, None


def _through_norm(dy: Tensor, y: Tensor, square: float, rate: Tensor, out: Tensor) -> None:
    """Writes x's gradient to `out` [g, B, H, C, K], where y = x rate and rate = sqrt(square / (|x|^2 + eps)); overwrites dy."""
    along = (dy * y).sum(-1, keepdim=True).div_(square)
    torch.mul(dy.addcmul_(y, along, value=-1).view(out.shape), rate, out=out)
