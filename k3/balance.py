"""Keeps experts evenly loaded: pooled Quantile Balancing (report 2.3.3) and the common alternatives behind the same switch.

Counts are taken in the backward pass. It runs exactly once for each token whatever is recomputed, so neither micro-batching nor
activation recomputation can double a count, and evaluation never counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from k3.config import Balance, MoEConfig
from kernels import quantile
from parallel.world import World


class Balancer(nn.Module):
    """Counts one router's step and moves its selection bias at the step's end.

    `bias` [E], in float32 also under bf16, is added to the scores for selection only and is frozen within a step.
    `load` [E] int64: tokens each expert received in the last finished step, padding excluded.
    """

    bias: Tensor
    load: Tensor
    counting: Tensor
    histogram: Tensor
    estimate: Tensor
    averaged_steps: Tensor

    def __init__(self, config: MoEConfig, dtype: torch.dtype):
        super().__init__()
        self.mode, self.top_k, self.ema, self.bias_step = config.balance, config.top_k, config.ema, config.bias_step
        self.bins = config.bins
        experts = config.experts
        self.name = ""  # the layer's, set by k3.build
        self.register_buffer("bias", torch.zeros(experts, dtype=dtype))
        self.register_buffer("counting", torch.zeros(experts, dtype=torch.int64), persistent=False)
        self.register_buffer("load", torch.zeros(experts, dtype=torch.int64), persistent=False)
        if self.mode is Balance.quantile:
            self.register_buffer("histogram", torch.zeros(experts, config.bins, dtype=torch.int32), persistent=False)
            if self.ema:
                self.register_buffer("estimate", torch.zeros(experts, dtype=dtype))
                self.register_buffer("averaged_steps", torch.zeros((), dtype=torch.int64))

    def observe(self, scores: Tensor, chosen: Tensor, threshold: Tensor, counted: Tensor | None) -> Tensor:
        """Returns `scores` [N, E], tied to a node whose backward pass counts these tokens once."""
        return _CountInBackward.apply(scores, chosen, threshold, counted, self) if scores.requires_grad else scores

    def count(self, scores: Tensor, chosen: Tensor, threshold: Tensor, counted: Tensor | None) -> None:
        """Adds one micro-batch: scores [N, E], chosen [N, k], threshold [N] (the (k+1)-th score + bias), counted bool [N]."""
        picked = chosen if counted is None else chosen[counted]
        self.counting += torch.bincount(picked.reshape(-1), minlength=self.counting.numel())
        if self.mode is Balance.quantile:
            self.histogram += quantile.count(scores, threshold, self.bias, self.bins, counted)

    def auxiliary(self, scores: Tensor, chosen: Tensor, counted: Tensor | None, weight: float, group: Any) -> Tensor:
        """Returns `scores` tied to this rank's part of the auxiliary loss weight * E * sum_e f_e P_e.

        f is the load share and P the mean score share of this micro-batch's tokens on all ranks of `group` together, those that
        hold different tokens: the loss is the same however the micro-batch is spread.
        """
        experts = scores.shape[1]
        rows = scores if counted is None else scores[counted]
        picked = chosen if counted is None else chosen[counted]
        load = torch.bincount(picked.reshape(-1), minlength=experts)
        if group.size() > 1:
            dist.all_reduce(load, group=group)
        total = load.sum().clamp(min=1)  # tokens x k
        share = load.to(scores.dtype) / total
        mean = (rows / rows.sum(1, keepdim=True)).sum(0) * (self.top_k / total)
        return _AddLoss.apply(scores, weight * experts * (share * mean).sum())

    @torch.no_grad()
    def update(self) -> None:
        """Ends a step: moves the bias (in effect from the next step) and clears the counts."""
        if self.mode is Balance.quantile:
            counted = self.counting.sum() > 0  # MTP layers may take no part in a phase
            quantiles = quantile.quantiles(self.histogram, self.bias, self.top_k)
            if self.ema:
                self.averaged_steps += counted
                averaged = self.ema * self.estimate + (1 - self.ema) * quantiles
                self.estimate.copy_(torch.where(counted, averaged, self.estimate))
                quantiles = self.estimate / (1 - self.ema ** max(1, int(self.averaged_steps)))
            self.bias.copy_(torch.where(counted, quantile.centre(quantiles), self.bias))
        elif self.mode is Balance.bias:
            load = self.counting.to(self.bias.dtype)
            self.bias += self.bias_step * torch.sign(load.mean() - load)
        self.reset()

    def reset(self) -> None:
        """Ends a step, a skipped one too: its counts become `load`, and the bias stays."""
        self.load.copy_(self.counting)
        self.counting.zero_()
        if self.mode is Balance.quantile:
            self.histogram.zero_()


class Balancing(Sequence[Balancer]):
    """All balancers of a model: a step's counts are pooled over the ranks that saw different tokens, then every bias moves."""

    def __init__(self, balancers: Sequence[Balancer], world: World):
        self.balancers, self.world = list(balancers), world

    def __getitem__(self, index: Any) -> Any:
        return self.balancers[index]

    def __len__(self) -> int:
        return len(self.balancers)

    def update(self) -> None:
        """Ends a step on every balancer."""
        self.pool()
        for balancer in self.balancers:
            balancer.update()

    def reset(self) -> None:
        """Ends a skipped step on every balancer."""
        self.pool()
        for balancer in self.balancers:
            balancer.reset()

    def pool(self) -> None:
        """One integer all-reduce for each kind of count, whatever the number of layers.

        Every rank of the tensor, context and data axes routes tokens of its own: LatentMoE splits them over tensor ranks with
        and without sequence parallelism.
        """
        group = self.world.groups.tp_dp_cp
        if not self.balancers or group.size() == 1:
            return
        kinds = [[b.counting for b in self.balancers]]
        if self.balancers[0].mode is Balance.quantile:
            kinds.append([b.histogram for b in self.balancers])
        for counts in kinds:
            pooled = torch.stack(counts)
            dist.all_reduce(pooled, group=group)
            torch._foreach_copy_(counts, list(pooled.unbind(0)))


class _CountInBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, chosen: Tensor, threshold: Tensor, counted: Tensor | None, balancer: Balancer
    ) -> Tensor:
        ctx.save_for_backward(scores, chosen, threshold, counted)
        ctx.balancer = balancer
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        ctx.balancer.count(*ctx.saved_tensors)
        return grad_outputs[0], None, None, None, None


class _AddLoss(torch.autograd.Function):
    """Passes scores through; in backward the attached loss receives gradient 1, as if it were part of the step's loss."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grad_outputs[0], torch.ones_like(loss)
