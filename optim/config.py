"""The optimizer's dials, as the user types them (`optim.lr=2e-3`). Report 2.5 gives none: K2 and Moonlight are followed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class OptimizerName(Enum):
    muon = "muon"  # Per-Head Muon for matrices, AdamW for the rest
    adamw = "adamw"  # AdamW for everything


class Coefficients(Enum):
    quintic = "quintic"
    polar_express = "polar_express"


class MuonPrecision(Enum):
    """Of the products inside Newton-Schulz; the momentum and the update keep the master's dtype."""

    full = "full"  # float32 (float64 for float64 weights)
    bf16 = "bf16"  # as K2 and Moonlight ran it; about twice as fast where there are bf16 matrix units


class Distribution(Enum):
    """How matrices that ZeRO spreads over ranks are orthogonalised."""

    owners = "owners"  # each by one rank, which fetches what it lacks
    gather = "gather"  # everything by every rank: the naive form, for comparison


class ScheduleName(Enum):
    cosine = "cosine"
    wsd = "wsd"
    constant = "constant"


class RouterOptimizer(Enum):
    adamw = "adamw"
    muon = "muon"


class AdamWKernel(Enum):
    auto = "auto"  # Transformer Engine's or apex's on GPUs, DeepSpeed's where the optimizer is offloaded; what is installed
    torch = "torch"
    deepspeed = "deepspeed"  # DeepSpeedCPUAdam
    apex = "apex"
    transformer_engine = "transformer_engine"


class Offload(Enum):
    none = "none"  # masters and moments lie beside the weights
    cpu = "cpu"  # in CPU memory: AdamW and all that is elementwise run there, Newton-Schulz on the device


@dataclass
class MuonConfig:
    per_head: bool = True  # false: whole matrices (fused gate/up and experts stay apart)
    momentum: float = 0.95
    nesterov: bool = True
    steps: int = 5  # Newton-Schulz iterations
    coefficients: Coefficients = Coefficients.quintic
    precision: MuonPrecision = MuonPrecision.full
    scale: float = 0.2  # update RMS; multiplies sqrt(max(rows, cols)) of the block
    distribution: Distribution = Distribution.owners


@dataclass
class AdamWConfig:
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    kernel: AdamWKernel = AdamWKernel.auto


@dataclass
class WeightClipConfig:
    """QK-Clip on the MLA heads (report 3.3: the mechanism introduced in K2)."""

    enabled: bool = True
    tau: float = 100.0


@dataclass
class RouterConfig:
    optimizer: RouterOptimizer = RouterOptimizer.adamw
    lr_scale: float = 0.05  # times optim.lr: a slow router keeps the experts' loads even


@dataclass
class ScheduleConfig:
    name: ScheduleName = ScheduleName.cosine
    warmup: float = 0.01  # fraction of run.steps (at least one step)
    min_lr: float = 0.05  # fraction of optim.lr at the end
    decay: float = 0.2  # wsd: the fraction of run.steps that decays at the end


@dataclass
class GuardConfig:
    """When a step is skipped: it then leaves weights, moments and biases as they are. The rules are explained in optim/guard.py.

    A loss or gradient norm that is not finite always skips its step.
    """

    enabled: bool = True  # false: spikes skip nothing
    window: int = 128  # the accepted steps whose median is the yardstick
    min_steps: int = 32  # accepted steps before anything can be called a spike
    deviations: float = 6.0  # a spike lies more than so many standard deviations above the median,
    grad_norm: float = 5.0  # and is a gradient norm of more than so many times the median,
    loss: float = 1.3  # or a loss of more than so many times the median
    max_skipped: int = 10  # so many skipped steps in a row end the run


@dataclass
class OptimConfig:
    name: OptimizerName = OptimizerName.muon
    lr: float = 1.5e-2  # of nano's short run; larger models want less (K2: 2e-4)
    weight_decay: float = 0.1
    grad_clip: float = 1.0  # global gradient norm; 0 switches it off
    offload: Offload = Offload.none
    muon: MuonConfig = field(default_factory=MuonConfig)
    adamw: AdamWConfig = field(default_factory=AdamWConfig)
    clip: WeightClipConfig = field(default_factory=WeightClipConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
