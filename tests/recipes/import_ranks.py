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
from recipes.initial import initial
from recipes.stored import Stored


def through(sizes: dict[str, Any], path: str, folder: str) -> None:
    """Loads the imported checkpoint under a layout, and saves the model as a checkpoint in `folder`."""
    world = parallel.start(ParallelConfig(**sizes), "cpu")
    weights, stored = initial(path, world), Stored(Path(path))
    assert weights is not None
    model = k3.build(weights.model, world, dtype=torch.bfloat16, draw_values=False)
    weights.weights(model)
    providers = {"model": ModuleState(model, k3.cards(model), world)}
    checkpoint.save(Path(folder), 1, providers, {"model": stored.facts["model"]}, world)
