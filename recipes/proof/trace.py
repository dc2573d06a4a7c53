"""Runs a few training steps of a layout on this machine and records everything a proof compares."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from k3.activations import ActivationConfig
from parallel.config import ParallelConfig, world_size
from parallel.local import Helper
from recipes.config import Config

ON_RANK = "recipes.proof.rank:on_rank"  # a module that imports the whole stack: in the ranks alone
TIMEOUT = 900.0  # seconds


@dataclass
class Trace:
    """What a layout did. Tensors are whole, whatever the layout; names are in the model's order.

    Legend: S steps, M micro-batches a step, T tokens, B rows of a micro-batch, E experts, k chosen ones.
    """

    processes: int
    losses: list[list[float]] = field(default_factory=list)  # by step: next token, then each MTP layer
    grad_norms: list[float] = field(default_factory=list)  # by step
    skipped: list[str | None] = field(default_factory=list)  # by step: why, or None where it was taken
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the first step, by parameter
    weights: dict[str, Tensor] = field(default_factory=dict)  # after the last step, router biases included
    bins: dict[str, float] = field(default_factory=dict)  # by router bias: the width of its histogram's bins, its resolution
    muon: set[str] = field(default_factory=set)  # the parameters that Muon trains
    outputs: dict[str, Tensor] = field(default_factory=dict)  # of the first micro-batch, by part: [T, B, d]
    chosen: dict[str, Tensor] = field(default_factory=dict)  # by router: [S, M, T, B, k], experts in ascending order
    gaps: dict[str, Tensor] = field(default_factory=dict)  # by router: [S, M, T, B], the k-th best score + bias less the next
    loads: dict[str, Tensor] = field(default_factory=dict)  # by router: [S, E] int64, as the balancer counted them
    counted: Tensor = field(default_factory=lambda: torch.zeros(0))  # bool [S, M, T, B]: not padding
    drift: dict[str, list[str]] = field(default_factory=dict)  # parameter -> axes over which its copies differ bitwise
    traffic: dict[str, dict[str, int]] = field(default_factory=dict)  # axis -> collective -> bytes, all ranks, first step


def single(cfg: Config) -> Config:
    """The same in one process that recomputes nothing."""
    return dataclasses.replace(cfg, parallel=ParallelConfig(dp=1), activations=ActivationConfig())


def trace(cfg: Config, helper: Helper, *, traffic: bool = True) -> Trace:
    """The trace of `cfg`'s layout (its sections model, optim, parallel, activations and prove). Raises RankError where it fails.

    traffic: count bytes in the first step, which slows it down.
    """
    ranks = helper.run_ranks(ON_RANK, world_size(cfg.parallel), cfg, traffic, timeout=TIMEOUT)
    return merge([t for t in ranks if t is not None])


def merge(stages: Sequence[Trace]) -> Trace:
    """One trace of the pipeline ranks' own: each holds its part of the model, and all of them the losses."""
    out = stages[0]
    for name in ("gradients", "weights", "bins", "outputs", "chosen", "gaps", "loads", "drift"):
        # the first stage's where the last one holds a copy
        setattr(out, name, {key: value for stage in reversed(stages) for key, value in getattr(stage, name).items()})
    out.muon = set().union(*(stage.muon for stage in stages))
    return out
