"""How evenly the experts are used: largest over mean load and the fraction without a token, per layer and for the worst."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recipes.trainer import Callback, StepResult, Trainer


class Balance(Callback):
    """Adds to the metrics, for each MoE layer, from `balancer.load` [experts]: tokens of the last step's global batch."""

    def __init__(self, balancers: Sequence[Any]):
        self.balancers = balancers

    def step(self, trainer: Trainer, result: StepResult) -> None:
        if not self.balancers:
            return
        ratios, dead, loads = {}, {}, {}
        for balancer in self.balancers:
            load = balancer.load
            ratios[balancer.name] = (load.max() / load.double().mean().clamp(min=1e-9)).item()
            dead[balancer.name] = (load == 0).double().mean().item()
            loads[balancer.name] = load.tolist()
        result.metrics |= {
            "load/max_over_mean": max(ratios.values()),
            "load/dead_fraction": max(dead.values()),
            **{f"load/max_over_mean/{name}": value for name, value in ratios.items()},
            **{f"load/dead_fraction/{name}": value for name, value in dead.items()},
            "load/experts": loads,
        }
