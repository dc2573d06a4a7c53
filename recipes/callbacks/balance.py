"""How evenly the experts are used: largest over mean load and the fraction without a token, per layer and for the worst."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parallel.together import over_stages
from recipes.trainer import Callback, StepResult, Trainer


class Balance(Callback):
    """Adds to the metrics, for each MoE layer, from `balancer.load` [experts]: tokens of the last step's global batch."""

    def __init__(self, balancers: Sequence[Any]):
        self.balancers = balancers

    def step(self, trainer: Trainer, result: StepResult) -> None:
        of_layers = over_stages(trainer.objective.world, {b.name: b.load.cpu() for b in self.balancers})
        of_layers = {name: load for name, load in of_layers.items() if load.any()}  # MTP layers take no part in every phase
        if not of_layers:
            return
        ratios = {name: (load.max() / load.double().mean().clamp(min=1e-9)).item() for name, load in of_layers.items()}
        dead = {name: (load == 0).double().mean().item() for name, load in of_layers.items()}
        loads = {name: load.tolist() for name, load in of_layers.items()}
        result.metrics |= {
            "load/max_over_mean": max(ratios.values()),
            "load/dead_fraction": max(dead.values()),
            **{f"load/max_over_mean/{name}": value for name, value in ratios.items()},
            **{f"load/dead_fraction/{name}": value for name, value in dead.items()},
            "load/experts": loads,
        }
