"""What `k3 bench traffic` runs on its ranks: one forward and backward pass, its bytes counted."""

from __future__ import annotations

import torch

import parallel
from k3.config import K3Config
from k3.construct import build
from parallel.config import ParallelConfig
from parallel.traffic import Traffic

ROWS = 2  # of each data rank


def on_rank(model: K3Config, layout: ParallelConfig, length: int) -> dict[str, dict[str, int]]:
    world = parallel.start(layout, "cpu")
    stage = build(model, world)
    generator = torch.Generator().manual_seed(world.data_rank)
    tokens = torch.randint(model.vocab_size, (ROWS, length + 1), generator=generator)
    with Traffic(world) as traffic:
        stage(tokens[:, :-1].contiguous(), labels=tokens[:, 1:].contiguous()).sum().backward()
    return traffic.of_all_ranks()
