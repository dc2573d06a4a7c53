"""Ranks of a proof with one thing broken on them: the proof must say which."""

from __future__ import annotations

import torch

import parallel.schedule
from parallel.schedule import ParallelModel
from recipes.config import Config
from recipes.proof.rank import on_rank
from recipes.proof.trace import Trace


def divided_gradients(cfg: Config) -> Trace | None:
    """Gradients come out divided by the data-parallel size."""
    finish = ParallelModel.finish

    def divided(self: ParallelModel) -> None:
        finish(self)
        for _, shard in self.shards.items():
            shard.gradient.div_(self.world.data_size)  # type: ignore[union-attr]

    parallel.schedule.ParallelModel.finish = divided  # type: ignore[method-assign]
    return on_rank(cfg)


def drifting_copy(cfg: Config) -> Trace | None:
    """The last bit of one element of one norm differs on rank 1 at the end."""
    from recipes.proof import gather

    drift = gather.drift

    def after(cards, world):  # type: ignore[no-untyped-def]
        if world.rank == 1:
            norm = cards.tensor("layers.2.input_layernorm.weight").data
            norm[0] = torch.nextafter(norm[0], norm[0] + 1)
        return drift(cards, world)

    gather.drift = after
    return on_rank(cfg)
