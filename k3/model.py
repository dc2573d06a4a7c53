"""The model as one rank holds it: its pipeline stages, under the names that their parts have in the whole model."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from k3.activations import ActivationConfig
from k3.builder import Builder
from k3.config import K3Config
from k3.layout import row_plan
from k3.origin import Origin
from k3.qat import QatConfig
from k3.quantised import fixed
from k3.stage import Stage
from parallel.rows import RowBank
from parallel.stages import split_layers


class Model(nn.Module):
    """Build it with `k3.build`, which also draws the parameters.

    Without pipelines it is one stage, and calling it calls that: `model(tokens)` gives logits, with `labels` per-token losses
    (see Stage.forward). Otherwise `parallel.run_step` runs `stages`, each in its turn; `rows` is what they share.
    """

    def __init__(self, config: K3Config, build: Builder, activations: ActivationConfig):
        super().__init__()
        self.k3, self.world = config, build.world
        self.qat = build.qat or QatConfig()
        world = build.world
        layers = split_layers(config.layers, world.config)
        self.rows = RowBank(row_plan(config, world.config))
        # a tuple, and so no submodule: their parts are, under the whole model's names
        self.stages = tuple(Stage(config, build, activations, number, layers[number], self.rows) for number in world.stages)
        first, last = self.stages[0], self.stages[-1]
        if owner := next((s for s in self.stages if hasattr(s, "embedding")), None):
            self.embedding = owner.embedding
        self.layers = nn.ModuleDict({name: layer for stage in self.stages for name, layer in stage.layers.items()})
        if last.is_last:
            self.output_residual, self.norm, self.head, self.mtp = last.output_residual, last.norm, last.head, last.mtp
        self.origin: Origin | None = None  # the published checkpoint it was loaded from (k3/hf)
        self.is_whole = first.is_first and last.is_last and len(self.stages) == 1

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if not self.is_whole:
            raise RuntimeError("this rank holds stages of a pipeline, which run together: call parallel.run_step")
        return self.stages[0](*args, **kwargs)

    def fixed_weights(self) -> AbstractContextManager[None]:
        """As long as it lasts, no parameter changes, and what is computed from them alone is kept (k3/quantised.py). Steps and
        evaluations by `parallel.schedule` open it themselves; whoever calls the model many times in between does.
        """
        return fixed(self)

    def holds(self, name: str) -> bool:
        """Whether the part that a parameter or buffer of the whole model belongs to is on this rank."""
        parts = [name for name, part in self.named_children() if not isinstance(part, (nn.ModuleDict, nn.ModuleList))]
        parts += [f"{group}.{i}" for group in ("layers", "mtp") for i, _ in getattr(self, group, nn.Module()).named_children()]
        return name.startswith(tuple(f"{part}." for part in parts))
