"""Block Attention Residuals (report 2.2): what a sub-layer reads is a learned mix of finished blocks and the running sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from k3.linear import RMSNorm
from kernels.attnres import mix, mix_norm
from parallel.megatron import TransformerConfig


@dataclass(frozen=True)
class Rows:
    """What travels from layer to layer: the running sum `prefix` and the `bank` of finished blocks, each [T, B, d].

    The bank's first row is the embedding. With the plain residual stream the bank stays empty.
    """

    prefix: Tensor
    bank: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, prefix: Tensor, *bank: Tensor) -> Rows:
        return cls(prefix, bank)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What `of` takes."""
        return self.prefix, *self.bank

    def after_attention(self, out: Tensor, *, begins_block: bool) -> Rows:
        """A layer that begins a block puts the finished sum into the bank and starts a new one with its own output."""
        return Rows(out, (*self.bank, self.prefix)) if begins_block else Rows(self.prefix + out, self.bank)

    def after_feed_forward(self, out: Tensor) -> Rows:
        return Rows(self.prefix + out, self.bank)


class ReadRunningSum(nn.Module):
    """The plain residual stream: a sub-layer reads the running sum, through its norm where one is given."""

    def forward(self, rows: Rows, norm: RMSNorm | None = None) -> Tensor:
        return rows.prefix if norm is None else norm(rows.prefix)


class Untouched(torch.autograd.Function):
    """Returns x; gives unused parameters a gradient of zeros, without which gradients could not be reduced during backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *unused: Tensor) -> Tensor:
        ctx.unused = unused
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, ...]:
        return grad_outputs[0], *(torch.zeros_like(p) for p in ctx.unused)


class ReadBlocks(nn.Module):
    """softmax_i(<RMS(row_i), norm * query>) over the bank and the running sum; queries start at zero, a uniform mix.

    With `norm`, that norm of the mix, which is then not saved but mixed again in the backward pass (report 5.2.2): a sub-layer
    saves what it would on a plain residual stream, and three numbers a token and row.
    `weights` [n] holds the mean reading weight of each source in the last forward pass (for pictures and metrics).
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.norm = nn.Parameter(torch.empty(config.hidden_size, dtype=config.params_dtype))
        self.query = nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))
        self.weights: Tensor | None = None

    def forward(self, rows: Rows, norm: RMSNorm | None = None) -> Tensor:
        if not rows.bank:  # the first layer's attention: nothing to mix, its weights exist in the release all the same
            prefix = Untouched.apply(rows.prefix, self.norm, self.query)
            return prefix if norm is None else norm(prefix)
        sources = (*rows.bank, rows.prefix)
        if norm is None:
            out, weights = mix(sources, self.norm, self.query, eps=self.eps)
        else:
            out, weights = mix_norm(sources, self.norm, self.query, norm.weight, eps=self.eps)
        self.weights = weights.flatten(1).mean(1)
        return out
