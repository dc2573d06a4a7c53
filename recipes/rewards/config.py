"""Which rewards judge a completion and what each may use, as the user types it (`rewards.names=[exact,format]`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from recipes.errors import UserError, suggestion

BUILT_IN = ("exact", "format", "math", "tests")
SANDBOXED = ("math", "tests")  # and every plug-in, and exact for generators with a rule of their own


@dataclass
class RewardsConfig:
    # exact, format, math, tests, or a function of yours: file.py:function or package.module:function. The reward is the sum of
    # weights x scores. A task that names its own reward (jsonl) has that in the place of the first.
    names: list[str] = field(default_factory=lambda: ["exact"])
    weights: list[float] | None = None  # one a name; null: 1 for the first, 0.1 for each other
    partial_tests: bool = False  # tests: the share that passes, instead of 1 for all and 0 otherwise
    workers: int = 1  # processes for each reward that runs in the sandbox
    seconds: float = 10.0  # for one judgement in the sandbox
    memory_mb: int = 1024  # of each process in a sandbox
    processes: int = 8  # and threads, in one sandbox
    disk_mb: int = 64  # of its own folder, which lies in memory


def weights(cfg: RewardsConfig) -> list[float]:
    return list(cfg.weights) if cfg.weights is not None else [1.0] + [0.1] * (len(cfg.names) - 1)


def is_plug_in(name: str) -> bool:
    place, colon, function = name.rpartition(":")
    return bool(colon and place and function.isidentifier())


def check_name(name: str, key: str = "rewards.names") -> None:
    """Raises UserError for a name that is neither built in nor of a plug-in's form."""
    if name not in BUILT_IN and not is_plug_in(name):
        raise UserError(
            f"{key}={name}: no such reward{suggestion(name, BUILT_IN)}; there are {', '.join(BUILT_IN)}, and your own as "
            "file.py:function or package.module:function"
        )


def validate(cfg: RewardsConfig) -> None:
    """Raises UserError with every broken rule, one a line."""
    broken = []
    if not cfg.names:
        broken.append("rewards.names=[]: give at least one; exact is usual")
    for name in cfg.names:
        try:
            check_name(name)
        except UserError as error:
            broken.append(str(error))
    if len(set(cfg.names)) < len(cfg.names):
        broken.append(f"rewards.names=[{','.join(cfg.names)}]: a name is given twice")
    if cfg.weights is not None and len(cfg.weights) != len(cfg.names):
        broken.append(f"rewards.weights={cfg.weights}: give {len(cfg.names)}, one for each of rewards.names")
    for name, least in (("workers", 1), ("memory_mb", 128), ("processes", 2), ("disk_mb", 1)):
        if getattr(cfg, name) < least:
            broken.append(f"rewards.{name}={getattr(cfg, name)}: must be at least {least}")
    if cfg.seconds <= 0:
        broken.append(f"rewards.seconds={cfg.seconds}: must be above 0")
    if broken:
        raise UserError("\n".join(broken))
