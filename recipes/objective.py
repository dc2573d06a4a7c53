"""The loss of a step: next-token cross-entropy plus the weighted MTP losses, each over its global count of targets.

`loss = sum_m weight_m * sum(losses[m]) / count_m`, sums and counts over the whole global batch. The counts are known before
the forward pass, so nothing depends on how the batch is cut into micro-batches or ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data.batch import Batch
from parallel.world import World


@dataclass(frozen=True)
class Objective:
    """`weights` [1 + M]: 1 for the next token, then one for each of the M MTP layers."""

    weights: tuple[float, ...]
    world: World

    @property
    def horizon(self) -> int:
        """How many tokens ahead the targets reach: 1 + the number of MTP layers."""
        return len(self.weights)

    def denominators(self, micro_batches: Sequence[Batch]) -> Tensor:
        """Counted targets of the global batch for each loss, [1 + M] float64, at least 1 each."""
        counts = torch.stack([batch.loss_mask.sum(dim=(1, 2)) for batch in micro_batches]).sum(0)
        # context and tensor ranks were given the same whole rows
        return self._sum(counts.to(torch.float64), self.world.groups.dp).clamp(min=1)

    def forward(self, model: nn.Module, batch: Batch, step_tokens: int) -> Tensor:
        """The losses [1 + M, B, T / context ranks] of one micro-batch out of a step of `step_tokens` tokens."""
        batch = to_device(batch, self.world.device)
        return model(
            batch.tokens,
            batch.document_starts,
            labels=batch.labels,
            loss_mask=batch.loss_mask,
            padding=batch.padding,
            share=batch.tokens.numel() * self.world.data_size / step_tokens,
        )

    def share(self, losses: Tensor, denominators: Tensor) -> tuple[Tensor, Tensor]:
        """One micro-batch's share of the step: (the scalar to differentiate, its parts [1 + M] for the report)."""
        parts = losses.sum(dim=(1, 2)) / denominators.to(losses)
        weights = torch.tensor(self.weights, dtype=losses.dtype, device=losses.device)
        return (parts * weights).sum(), parts.detach()

    def total(self, shares: Sequence[Tensor]) -> list[float]:
        """The step's losses [1 + M] from its micro-batches' parts."""
        return self._sum(torch.stack(list(shares)).to(torch.float64).sum(0), self.world.groups.dp_cp).tolist()

    def _sum(self, values: Tensor, group: Any) -> Tensor:
        if group.size() > 1:
            values = values.to(self.world.device)
            dist.all_reduce(values, group=group)
        return values


def to_device(batch: Batch, device: torch.device) -> Batch:
    return batch if batch.tokens.device == device else batch.to(device)


@torch.no_grad()
def heldout_loss(model: nn.Module, batches: Sequence[Batch], world: World) -> float:
    """Mean next-token cross-entropy in nats over all counted targets of a fixed set. Leaves the model's mode as it was.

    Data ranks share the batches; every rank must call it with the same ones. Computed from logits: the MTP layers play no part.
    """
    training = model.training
    model.eval()
    total, count = torch.zeros((), dtype=torch.float64), 0
    try:
        for first in range(0, len(batches), world.data_size):
            number = first + world.data_rank
            counts = number < len(batches)  # the others wait in expert dispatch: a rank without a batch takes part with any
            batch = to_device(batches[number if counts else first], world.device)
            logits = model(batch.tokens, batch.document_starts)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            losses = nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
            mask = batch.loss_mask[0].flatten()
            if counts:
                total += losses.masked_fill(~mask, 0).sum(dtype=torch.float64).cpu()
                count += int(mask.sum())
    finally:
        model.train(training)
    if world.data_size > 1:
        sums = torch.stack([total, total.new_tensor(count)]).to(world.device)
        dist.all_reduce(sums, group=world.groups.dp)
        total, count = sums[0].cpu(), int(sums[1])
    return (total / max(count, 1)).item()
