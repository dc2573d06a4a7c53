"""KDA over one stretch of a sequence whose other stretches are elsewhere, as on other ranks (KCP: report 5.1.2).

A stretch acts on the state before it as S -> M S + N. `Link` exchanges these pairs and, in the backward pass, gradients of
states. `compose` is the obvious form, made of runs of any KDA operator; `chunked` has a cheaper one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class Link(Protocol):
    """The other stretches of one run of the operator. Both methods are called once, in this order, by every stretch."""

    def incoming(self, fragment: Tensor) -> Tensor:
        """fragment [B, H, K, K + V] is this stretch's [M | N]; returns the state before its first token, [B, H, K, V]."""
        ...

    def gradient(self, d_incoming: Tensor) -> Tensor:
        """d_incoming [B, H, K, V]: the gradient of the incoming state through the outputs of this stretch alone.

        Returns that of the state after its last token, through all later stretches.
        """
        ...


def state_map(kda: Callable[..., tuple[Tensor, Tensor]], k: Tensor, v: Tensor, *decay: Tensor, **options: Any) -> Tensor:
    """[M | N] of a stretch, [B, H, K, K + V], by one run of `kda` from the state [1 | 0] with the values [0 | v].

    A state's columns never mix, so the first K of them follow M. M is zero in rows where a document begins.
    """
    batch, length, heads, width = k.shape
    values = torch.cat([v.new_zeros(batch, length, heads, width), v], -1)
    math = torch.float64 if k.dtype == torch.float64 else torch.float32
    one = torch.eye(width, width + v.shape[-1], dtype=math, device=k.device).expand(batch, heads, -1, -1)
    return kda(k, k, values, *decay, initial_state=one, **options)[1]


def compose(
    kda: Callable[..., tuple[Tensor, Tensor]], link: Link, q: Tensor, k: Tensor, v: Tensor, *decay: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Runs `kda` twice: for what the stretch does to a state, then from the state that comes in."""
    incoming = _Through.apply(state_map(kda, k, v, *decay, **options), link)
    return kda(q, k, v, *decay, initial_state=incoming, **options)


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fragment: Tensor, link: Link) -> Tensor:
        ctx.link, ctx.keys = link, fragment.shape[-2]
        incoming = link.incoming(fragment)
        ctx.save_for_backward(incoming)
        return incoming

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (incoming,) = ctx.saved_tensors
        d_state = ctx.link.gradient(grad_outputs[0])
        return torch.cat([d_state @ incoming.mT, d_state], -1), None
