"""What the ranks of test_communication.py run: one training step, its bytes counted."""

from __future__ import annotations

from typing import Any

import torch

import parallel
from data.batch import Batch
from parallel.schedule import run_step
from parallel.traffic import Traffic
from recipes.assemble import assemble
from recipes.config import Config
from tests.recipes.memory_ranks import batches


def step(cfg: Config) -> dict[str, dict[str, int]]:
    """Bytes of all ranks together, by axis and collective; those of the update under `update AXIS`."""
    world = parallel.start(cfg.parallel)
    parts = assemble(cfg.model, cfg.optim, world, dtype=torch.float32, seed=0, steps=10, activations=cfg.activations)
    rows = cfg.data.micro_batch_size or 1
    given: list[Batch] = batches(cfg, cfg.data.batch_size // (rows * world.data_size), rows, seed=world.data_rank)
    denominators = torch.ones(1 + cfg.model.mtp_layers)
    parts.model.module.train()

    def forward(stage: Any, batch: Batch) -> torch.Tensor:
        return parts.objective.forward(stage, batch, cfg.data.batch_size * cfg.data.seq_length)

    with Traffic(world) as passes:
        run_step(parts.model, given, forward, lambda _, losses: parts.objective.share(losses, denominators))
    with Traffic(world) as update:
        parts.optimizer.step()
    every, after = passes.of_all_ranks(), update.of_all_ranks()
    return every | {f"update {axis}": sent for axis, sent in after.items()}
