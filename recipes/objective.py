"""The loss of a step: next-token cross-entropy plus the weighted MTP losses, each over its global count of targets.

`loss = sum_m weight_m * sum(losses[m]) / count_m`, sums and counts over the whole global batch. The counts are known before
the forward pass, so nothing depends on how the batch is cut into micro-batches or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data.batch import Batch
from parallel.schedule import ParallelModel, evaluate, from_last_stage
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

    @property
    def unit(self) -> str:
        """Of the loss, for people."""
        return "nats"

    @property
    def names(self) -> tuple[str, ...]:
        """What `total` gives, under the names that metrics have."""
        return ("loss", *(f"mtp_loss/{depth}" for depth in range(1, self.horizon)))

    def yardstick(self, losses: Sequence[float]) -> float | None:
        """Of `total`'s values the one that must not spike; None: none is a measure of health."""
        return losses[0]

    def denominators(self, micro_batches: Sequence[Batch]) -> Tensor:
        """Counted targets of the global batch for each loss, [1 + M] float64, at least 1 each."""
        counts = torch.stack([batch.loss_mask.sum(dim=(1, 2)) for batch in micro_batches]).sum(0)
        # context and tensor ranks were given the same whole rows
        return self._sum(counts.to(torch.float64), self.world.groups.dp).clamp(min=1)

    def forward(self, stage: nn.Module, batch: Batch, step_tokens: int) -> Tensor:
        """The losses [1 + M, B, T / context ranks] of one micro-batch out of a step of `step_tokens` tokens, from the last stage;
        from the others what goes on to the next.
        """
        batch = to_device(batch, self.world.device)
        return stage(
            batch.tokens,
            batch.document_starts,
            labels=batch.labels,
            loss_mask=batch.loss_mask,
            padding=batch.padding,
            share=batch.tokens.numel() * self.world.data_size / step_tokens,
        )

    def share(self, losses: Tensor, denominators: Tensor, batch: Batch | None = None) -> tuple[Tensor, Tensor]:
        """One micro-batch's share of the step: (the scalar to differentiate, its parts [1 + M] for the report).

        batch: what the losses are of, for objectives that weigh tokens.
        """
        parts = losses.sum(dim=(1, 2)) / denominators.to(losses)
        weights = torch.tensor(self.weights, dtype=losses.dtype, device=losses.device)
        return (parts * weights).sum(), parts.detach()

    def total(self, shares: Sequence[Tensor]) -> list[float]:
        """The step's losses [1 + M] from its micro-batches' parts, which ranks without the last stage have none of."""
        total = torch.zeros(self.horizon, dtype=torch.float64, device=self.world.device)
        if shares:
            total += torch.stack(list(shares)).to(torch.float64).sum(0)
        return from_last_stage(self._sum(total, self.world.groups.dp_cp), self.world).tolist()

    def _sum(self, values: Tensor, group: Any) -> Tensor:
        if group.size() > 1:
            values = values.to(self.world.device)
            dist.all_reduce(values, group=group)
        return values


def to_device(batch: Batch, device: torch.device) -> Batch:
    return batch if batch.tokens.device == device else batch.to(device)


def heldout_loss(model: ParallelModel, batches: Sequence[Batch]) -> float:
    """Mean next-token cross-entropy in nats over all counted targets of a fixed set. Leaves the model's mode as it was.

    Data ranks share the batches; every rank must call it with the same ones. The MTP layers play no part.
    """
    return counted(model, batches).loss


@dataclass(frozen=True)
class Counted:
    """Of the counted targets of the main loss: their mean loss in nats, the share that was the likeliest token, their number."""

    loss: float
    accuracy: float
    targets: int


def counted(model: ParallelModel, batches: Sequence[Batch]) -> Counted:
    """As `heldout_loss`."""
    loss, hits, count = evaluated(model, batches, _over_mask, 3)
    return Counted(loss / max(count, 1), hits / max(count, 1), int(count))


def evaluated(
    model: ParallelModel, batches: Sequence[Batch], measure: Callable[[Batch, Tensor], Tensor], size: int
) -> list[float]:
    """The sum over a fixed set of `measure(batch, scores [2, B, T])`, `size` float64 numbers a batch, on every rank alike.

    scores: each label's loss in nats and whether it was the likeliest token (1 or 0). Data ranks share the batches; every rank
    must call it with the same ones. Leaves the model's mode as it was; of logits no more exist at once than
    `activations.head_chunk` tokens'.
    """
    world, module = model.world, model.module
    numbers = range(world.data_rank, len(batches), world.data_size)
    # the others wait in expert dispatch: a rank with one batch less takes part with any, which does not count
    filled = [*numbers, *[0] * (-(-len(batches) // world.data_size) - len(numbers))]
    training = module.training
    module.eval()
    try:
        sums = evaluate(
            model,
            [batches[i] for i in filled],
            lambda stage, batch: _scores(stage, to_device(batch, world.device)),
            lambda batch, scores: measure(to_device(batch, scores.device), scores),
        )
    finally:
        module.train(training)
    own = sums[: len(numbers)]
    total = torch.zeros(size, dtype=torch.float64, device=world.device)
    if own:
        total += torch.stack(own).sum(0)
    if world.data_size > 1:
        dist.all_reduce(total, group=world.groups.dp)
    return from_last_stage(total, world).tolist()


def _scores(stage: nn.Module, batch: Batch) -> Tensor:
    return stage(batch.tokens, batch.document_starts, labels=batch.labels, score=True)


def _over_mask(batch: Batch, scores: Tensor) -> Tensor:
    """[3] float64: sums over the counted targets of losses and hits, and their number."""
    mask = batch.loss_mask[0]
    sums = scores.masked_fill(~mask, 0).flatten(1).sum(1, dtype=torch.float64)
    return torch.cat([sums, mask.sum(dtype=torch.float64).unsqueeze(0)])
