"""The router of Stable LatentMoE (report 2.3): sigmoid scores, selection by score + bias, weights from unbiased scores.

Legend: N tokens of this rank, d hidden, E experts, k chosen ones.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3.balance import Balancer
from k3.config import Balance, K3Config
from k3.context import Context
from kernels.quantile import cutoff as select
from parallel.cards import DType
from parallel.megatron import TransformerConfig
from parallel.world import World


class Router(nn.Module):
    """[N, d] -> (chosen experts [N, k] in descending order of score + bias, their weights [N, k]). All math in float32."""

    def __init__(self, config: K3Config, megatron: TransformerConfig, world: World):
        super().__init__()
        self.group = world.groups.tp_dp_cp  # the ranks that route different tokens
        c = config.moe
        self.top_k, self.renormalise, self.scaling = c.top_k, c.renormalise, c.scaling
        self.aux_weight = c.aux_weight if c.balance is Balance.aux else 0.0
        self.weight = nn.Parameter(torch.empty(c.experts, config.hidden_size, dtype=megatron.params_dtype))
        self.balancer = Balancer(c, DType.FP32.resolve(megatron.params_dtype))

    def forward(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        bias = self.balancer.bias
        math = bias.dtype
        scores = torch.sigmoid(F.linear(x.to(math), self.weight.to(math)))
        chosen, threshold = select(scores.detach(), bias, self.top_k)
        if self.training:
            scores = self.balancer.observe(scores, chosen, threshold, context.counted)
            if self.aux_weight:
                scores = self.balancer.auxiliary(scores, chosen, context.counted, self.aux_weight * context.share, self.group)
        weights = scores.gather(1, chosen)
        if self.renormalise:
            weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
        return chosen, weights * self.scaling if self.scaling != 1.0 else weights
