"""One rank's part of a trace: the real trainer, with a callback that records."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

import k3
import parallel
from data.batch import Batch
from k3.balance import Balancer
from k3.config import Balance
from k3.construct import unwrap
from kernels.quantile import limits
from parallel.cards import Optimizer
from parallel.traffic import Traffic
from parallel.world import World
from recipes.assemble import Parts, assemble
from recipes.config import Config, ProofDType
from recipes.phases import TRAINS
from recipes.phases.draft import DraftObjective
from recipes.proof import gather
from recipes.proof.batches import Batches
from recipes.proof.randomise import randomise
from recipes.proof.trace import Trace
from recipes.proof.watch import Watch
from recipes.rl.objective import PolicyObjective
from recipes.trainer import Callback, StepResult, Trainer

DTYPES = {ProofDType.float64: torch.float64, ProofDType.float32: torch.float32, ProofDType.bfloat16: torch.bfloat16}


def on_rank(cfg: Config, traffic: bool = True) -> Trace | None:
    """On every rank: the whole trace of its stage on the first rank of each pipeline stage, None on the others."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    prove = cfg.prove
    world = parallel.start(cfg.parallel, "cpu")
    parts = assemble(
        cfg.model, cfg.optim, world, dtype=DTYPES[prove.dtype], seed=prove.seed, steps=prove.steps,
        activations=cfg.activations, qat=cfg.qat, prepare=lambda model: randomise(model, prove.seed),
        trains=TRAINS.get(cfg.phase),
    )  # fmt: skip
    horizon, objective = parts.objective.horizon, parts.objective
    if cfg.phase in ("rl", "distill"):
        r = cfg.rl
        objective = PolicyObjective((1.0,), world, low=r.low, high=r.high, tau=r.tau, limit=cfg.distill.limit)
    if cfg.phase == "draft":
        objective = DraftObjective.of(cfg.draft.steps, world)
        horizon = objective.horizon
    stream = Batches(prove, cfg.model.vocab_size, horizon, rank=world.data_rank, of=world.data_size, phase=cfg.phase)
    recorder = Recorder(parts, world)
    trainer = Trainer(parts.model, parts.optimizer, stream, objective, callbacks=[recorder])
    if traffic:
        with Traffic(world) as recorder.traffic:
            trainer.run(1)
    trainer.run(prove.steps)
    out = recorder.finish()
    everything = Batches(prove, cfg.model.vocab_size, horizon)
    out.counted = torch.stack([_counted(next(everything).micro_batches) for _ in range(prove.steps)])
    return out if world.groups.tp_dp_cp.rank() == 0 else None


def _counted(micro_batches: Sequence[Batch]) -> Tensor:
    """bool [M, T, B]."""
    masks = [torch.zeros_like(b.tokens, dtype=torch.bool) if b.padding is None else b.padding for b in micro_batches]
    return ~torch.stack(masks).transpose(1, 2)


def _bin(balancer: Balancer) -> float:
    """Width of a bin of the next step's histogram; of the fixed step where there is none."""
    if balancer.mode is not Balance.quantile:
        return balancer.bias_step if balancer.mode is Balance.bias else 0.0
    low, high = limits(balancer.bias)
    return float(high - low) / balancer.bins


class Recorder(Callback):
    """Fills a trace while a trainer runs."""

    def __init__(self, parts: Parts, world: World):
        self.parts, self.world = parts, world
        self.model = unwrap(parts.model.module)
        self.cards = k3.cards(self.model)
        self.watch = Watch(self.model)
        self.trace = Trace(processes=world.size)
        self.loads: list[dict[str, Tensor]] = []
        self.traffic: Traffic | None = None

    def gradients(self, trainer: Trainer) -> None:
        if not self.trace.gradients:
            with nullcontext() if self.traffic is None else self.traffic.paused():
                self.trace.gradients = gather.gradients(self.cards, self.parts.model.shards, self.world)

    def step(self, trainer: Trainer, result: StepResult) -> None:
        self.trace.losses.append(result.losses)
        self.trace.grad_norms.append(result.report.grad_norm)
        self.trace.skipped.append(result.report.reason)
        self.loads.append({b.name: b.load.clone() for b in k3.balancing(self.model)})

    def finish(self) -> Trace:
        """Collective."""
        t = self.trace
        t.weights = gather.weights(self.cards, self.world)
        t.drift = gather.drift(self.cards, self.world)
        t.outputs = self.watch.whole_outputs()
        steps = len(t.losses)
        for name, (chosen, gaps) in self.watch.whole_routes().items():
            t.chosen[name] = chosen.unflatten(0, (steps, -1)).to(torch.int16)
            t.gaps[name] = gaps.unflatten(0, (steps, -1))
        every = {name: torch.stack([loads[name] for loads in self.loads]) for name in self.loads[0]}
        # routers of MTP layers that take no part have chosen nothing, and then must have counted nothing
        t.loads = {name: load for name, load in every.items() if name in t.chosen or load.any()}
        t.traffic = {} if self.traffic is None else self.traffic.of_all_ranks()
        t.bins = {f"{b.name}.feed_forward.router.balancer.bias": _bin(b) for b in k3.balancing(self.model)}
        t.muon = {row.name for row in self.parts.optimizer.table.of(Optimizer.MUON)}
        return t
