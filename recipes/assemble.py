"""Model, gradient buffers, optimizer and objective of a run: the one place where they are put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

import k3
import optim
import parallel
from k3.activations import ActivationConfig
from k3.config import K3Config
from k3.low_precision import LowPrecision
from k3.qat import QatConfig
from optim.config import OptimConfig
from optim.optimizer import Optimizer
from parallel.schedule import ParallelModel
from parallel.world import World
from recipes.config import Precision
from recipes.objective import Objective

DTYPES = {Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16, Precision.fp64: torch.float64}
DTYPES |= {Precision.fp8: torch.bfloat16, Precision.mxfp8: torch.bfloat16}  # of parameters, and of all outside quantised products


@dataclass(frozen=True)
class Parts:
    model: ParallelModel
    optimizer: Optimizer
    objective: Objective


def assemble(
    model: K3Config,
    dials: OptimConfig,
    world: World,
    *,
    dtype: torch.dtype,
    seed: int,
    steps: int,
    activations: ActivationConfig | None = None,
    low_precision: LowPrecision | None = None,
    qat: QatConfig | None = None,
    prepare: Callable[[k3.Model], None] = lambda model: None,
    weights: Callable[[k3.Model], None] | None = None,
    trains: Callable[[str], bool] | None = None,
) -> Parts:
    """This rank's share of a run of `steps` steps; parameters are drawn from `seed`, or all set by `weights`.

    `prepare` may change them then: the optimizer's masters are taken from what it leaves. `trains` names the
    parameters that are trained; None: all.
    """
    built = k3.build(
        model, world, dtype=dtype, seed=seed, activations=activations, low_precision=low_precision, qat=qat,
        draw_values=weights is None,
    )  # fmt: skip
    if weights is not None:
        weights(built)
    prepare(built)
    if trains is not None:
        k3.freeze(built, lambda card: trains(card.name))
    cards = k3.cards(built)
    wrapped = parallel.wrap(built, cards, world)
    optimizer = optim.build(
        dials, cards, shards=wrapped.shards, steps=steps, clip_targets=k3.clip_targets(built), balancing=k3.balancing(built)
    )
    return Parts(wrapped, optimizer, Objective((1.0, *[model.mtp_weight] * model.mtp_layers), world))
