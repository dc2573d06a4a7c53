"""Linear layers and norms of the model: megatron-core's parallel ones, returning plain tensors.

The seam for other providers (Transformer Engine builds the same kinds). No layer has a bias; first values are drawn by
k3/init.py, so nothing is initialised here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.norm import rms_norm
from parallel.megatron import ColumnParallelLinear, RowParallelLinear, TransformerConfig, VocabParallelEmbedding
from parallel.world import World


def _undrawn(weight: Tensor) -> Tensor:
    return weight


class Column(ColumnParallelLinear):
    """Weight [out / tensor ranks, in]: heads, gates, channels, vocabulary. [T, ..., in] -> [T, ..., out / tensor ranks].

    Reads what `parallel.tensor.enter` gives, which also sums the gradients of the tensor ranks: nothing is communicated here.
    """

    def __init__(self, size_in: int, size_out: int, config: TransformerConfig, world: World):
        super().__init__(
            size_in, size_out, config=config, init_method=_undrawn, bias=False, gather_output=False, disable_grad_reduce=True,
            tp_group=world.groups.tp,
        )  # fmt: skip
        self.sequence_parallel = False  # its own gathering of the sequence

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not torch.is_grad_enabled():  # the same product without megatron-core's preparations for a backward pass
            return F.linear(x, self.weight)
        return super().forward(x, *args, **kwargs)[0]


class Row(RowParallelLinear):
    """Weight [out, in / tensor ranks]. [T, ..., in / tensor ranks] -> [T / s, ..., out], summed over tensor ranks; s is their
    number under sequence parallelism, else 1.
    """

    def __init__(self, size_in: int, size_out: int, config: TransformerConfig, world: World):
        super().__init__(
            size_in, size_out, config=config, init_method=_undrawn, bias=False, input_is_parallel=True, skip_bias_add=False,
            tp_group=world.groups.tp,
        )  # fmt: skip
        self.alone = world.groups.tp.size() == 1

    def forward(self, x: Tensor) -> Tensor:
        if self.alone and not torch.is_grad_enabled():
            return F.linear(x, self.weight)
        return super().forward(x)[0]


class Duplicated(nn.Module):
    """Weight [out, in], whole on every tensor rank."""

    def __init__(self, size_in: int, size_out: int, config: TransformerConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size_out, size_in, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class ConcatLinear(Duplicated):
    """Weight [d, n d] on n inputs side by side, without concatenating them."""

    def __init__(self, size: int, config: TransformerConfig, inputs: int = 2):
        super().__init__(inputs * size, size, config)
        self.inputs = inputs

    def forward(self, *inputs: Tensor) -> Tensor:
        first, *others = (F.linear(x, part) for x, part in zip(inputs, self.weight.chunk(self.inputs, dim=1), strict=True))
        return sum(others, first)


class Embedding(VocabParallelEmbedding):
    """Weight [vocabulary / tensor ranks, d]. tokens [B, T] -> [T / s, B, d]."""

    def __init__(self, size: int, width: int, config: TransformerConfig, world: World):
        super().__init__(
            size, width, init_method=_undrawn, config=config, reduce_scatter_embeddings=world.sequence_parallel,
            tp_group=world.groups.tp,
        )  # fmt: skip

    def forward(self, tokens: Tensor) -> Tensor:
        # where megatron-core scatters along the sequence it puts that axis first itself
        return super().forward(tokens if self.reduce_scatter_embeddings else tokens.t())


class RMSNorm(nn.Module):
    """RMSNorm over the last axis; statistics in float32 (float64 in a float64 model)."""

    def __init__(self, size: int, config: TransformerConfig, dtype: torch.dtype | None = None):
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype or config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, eps=self.eps)
