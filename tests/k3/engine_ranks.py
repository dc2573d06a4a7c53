"""Generation on the ranks of a layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import k3
import parallel
from k3.engine import Engine
from k3.generation.trajectory import Trajectory
from parallel.config import ParallelConfig
from recipes.proof.randomise import randomise

LENGTHS = (3, 40, 64, 70, 20, 1)


def generate(sizes: dict[str, Any], temperature: float, own: bool, draft: int = 0) -> dict[tuple[int, ...], list[int]]:
    """{key: tokens} of this rank's trajectories, in float64; `own`: every rank has some of them, else all have all.

    Two rounds, the first one paused, the same prompts again in the second.
    """
    world = parallel.start(ParallelConfig(**sizes), "cpu")
    model = k3.build(replace(k3.preset("tiny"), draft=draft > 0), world, dtype=torch.float64)
    randomise(model, 0)  # of recipes: the same values in every layout
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 256, (n,), generator=draw).tolist() for n in LENGTHS]
    rows = [Trajectory(prompt, (i, k)) for i, prompt in enumerate(prompts) for k in range(3)]
    if own:
        rows = rows[world.rank :: world.size]
        rows = rows[:2] if world.rank else rows  # not the same number of passes everywhere
    sampling = k3.Sampling(temperature, max_new_tokens=8)
    engine = Engine(model, slots=16, block=32, draft=draft)
    engine.run(rows, sampling, enough=len(rows) // 2)
    engine.run(rows, sampling)
    again = [Trajectory(t.prompt, (*t.key, 1)) for t in rows]
    engine.run(again, sampling)
    worst = engine.mismatch(rows, sampling) if world.groups.cp.size() == 1 or not own else 0.0
    assert worst < 1e-9, worst
    return {t.key: t.tokens for t in (*rows, *again)}
