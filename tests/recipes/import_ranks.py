"""What ranks do with an imported checkpoint in tests/recipes/test_import.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import k3
import parallel
from parallel import checkpoint
from parallel.config import ParallelConfig
from parallel.states import ModuleState
from recipes.importing import take_in
from recipes.initial import initial
from recipes.stored import Stored


def take(published: str, out: str) -> None:
    """`k3 import`, of which each rank does its share."""
    world = parallel.start(ParallelConfig(dp=None), "cpu")
    take_in(Path(published), Path(out), world)


def through(sizes: dict[str, Any], path: str, folder: str) -> None:
    """Loads the imported checkpoint under a layout, and saves the model as a checkpoint in `folder`."""
    world = parallel.start(ParallelConfig(**sizes), "cpu")
    weights, stored = initial(path, world), Stored(Path(path))
    assert weights is not None
    model = k3.build(weights.model, world, dtype=torch.bfloat16, draw_values=False)
    weights.weights(model)
    providers = {"model": ModuleState(model, k3.cards(model), world)}
    checkpoint.save(Path(folder), 1, providers, {"model": stored.facts["model"]}, world)
