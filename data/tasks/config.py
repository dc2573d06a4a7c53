"""Which tasks to train on, as the user types it (`tasks.generators=[chain_sum,gcd] tasks.parameters.gcd.max_value=20`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from data.errors import DataError
from data.tasks.presets import PRESETS


@dataclass
class TasksConfig:
    # reasoning-gym generators, taken in turn; name one twice for twice its share; [] for tasks.folder alone
    generators: list[str] = field(default_factory=lambda: ["chain_sum", "gcd", "family_relationships"])
    preset: str | None = "small"  # generator parameters for a small model (docs/tasks.md); null: reasoning-gym's own
    # over the preset: tasks.parameters.GENERATOR.PARAMETER=VALUE
    parameters: dict[str, dict[str, Any]] = field(default_factory=dict)
    folder: str | None = None  # a .jsonl or a folder of them, one task a line; has one turn beside the generators
    seed: int = 0  # which training tasks come in which order
    heldout: int = 256  # tasks of the fixed evaluation set, over all sources
    heldout_fraction: float = 0.1  # of all distinct prompts, by their hash: those are never trained on


def validate(cfg: TasksConfig) -> None:
    """Checks what can be known without reasoning-gym. Raises DataError with every broken rule, one a line."""
    broken = []
    if not cfg.generators and cfg.folder is None:
        broken.append("tasks.generators=[]: there is no tasks.folder either; give at least one of them")
    if cfg.preset is not None and cfg.preset not in PRESETS:
        broken.append(f"tasks.preset={cfg.preset}: no such preset; there are {', '.join(PRESETS)} and null")
    for name in cfg.parameters:
        if name not in cfg.generators:
            broken.append(f"tasks.parameters.{name}: not among tasks.generators=[{','.join(cfg.generators)}]; add it there")
        for reserved in ("seed", "size"):
            if reserved in cfg.parameters[name]:
                broken.append(f"tasks.parameters.{name}.{reserved}: is chosen for you; give tasks.seed or tasks.heldout")
    if cfg.seed < 0:
        broken.append(f"tasks.seed={cfg.seed}: must be at least 0")
    if cfg.heldout < 1:
        broken.append(f"tasks.heldout={cfg.heldout}: must be at least 1")
    if not 0 < cfg.heldout_fraction < 1:
        broken.append(f"tasks.heldout_fraction={cfg.heldout_fraction}: must lie between 0 and 1, both excluded; 0.1 is usual")
    if broken:
        raise DataError("\n".join(broken))
