"""The root configuration of a run, as the user types it (`k3 pretrain model=nano run.steps=200`), and the groups to choose from.

Each room owns its own part (`k3.config`, `optim.config`, ...); this file adds what belongs to the run itself. Nothing here
imports torch, so that help, completion and a dry run stay fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any

from data.config import DataConfig
from k3.config import K3Config
from k3.presets import PRESETS, nano
from optim.config import OptimConfig, OptimizerName
from parallel.config import ParallelConfig


class Precision(Enum):
    fp32 = "fp32"
    bf16 = "bf16"  # bf16 parameters with fp32 masters; what the cards keep in fp32 stays so
    fp64 = "fp64"  # for proofs
    fp8 = "fp8"  # CUDA with Transformer Engine
    mxfp8 = "mxfp8"  # CUDA of compute capability 10 with Transformer Engine


class Qat(Enum):
    none = "none"
    mxfp4 = "mxfp4"  # weights MXFP4, activations MXFP8: the phases after pretraining (report 4.1.4)


class Device(Enum):
    auto = "auto"  # CUDA if there is any, else the CPU
    cpu = "cpu"
    cuda = "cuda"


class WandbMode(Enum):
    auto = "auto"  # online where a key is configured, else offline
    online = "online"
    offline = "offline"
    disabled = "disabled"


@dataclass
class PrecisionConfig:
    name: Precision = Precision.fp32  # of parameters, activations and gradients


@dataclass
class RunConfig:
    dir: str | None = None  # the run folder; null: runs/<model>-<date>-<time>
    steps: int = 100  # optimizer steps in all, those before a resume included
    seed: int = 0  # of the initial parameters
    resume: str | None = None  # a run folder to continue, or "auto": continue what is in run.dir if anything is
    eval_every: int = 50  # steps between held-out losses; 0: only at the end
    sample_tokens: int = 64  # length of the sample generated at the end; 0: none
    sample_prompt: str = "def "  # what the sample continues
    device: Device = Device.auto
    threads: int | None = None  # CPU threads; null: OMP_NUM_THREADS, by default one a physical core
    compare_dense: float = 0.0  # share of the run (0 to 1) that model=dense trains too, at equal time; see the summary


@dataclass
class CheckpointConfig:
    every: int = 50  # steps between checkpoints; 0: only at the end and on a signal
    keep_last: int = 2  # older ones are deleted


@dataclass
class WandbConfig:
    mode: WandbMode = WandbMode.auto
    project: str = "k3"
    name: str | None = None  # null: the name of the run folder


@dataclass
class Config:
    model: K3Config = field(default_factory=nano)
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    qat: Qat = Qat.none
    run: RunConfig = field(default_factory=RunConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)


# group -> option -> its values: what `model=nano` chooses from
GROUPS: dict[str, dict[str, Callable[[], Any]]] = {
    "model": dict(PRESETS),
    "optim": {name.name: partial(OptimConfig, name=name) for name in OptimizerName},
    "precision": {name.name: partial(PrecisionConfig, name=name) for name in Precision},
}


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf of a configuration, in the order of its fields."""
    for item in fields(value):
        key, inner = prefix + item.name, getattr(value, item.name)
        if is_dataclass(inner):
            yield from leaves(inner, key + ".")
        else:
            yield key, inner
