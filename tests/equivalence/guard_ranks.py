"""What each rank of `test_guards.py` does: a run in which one rank's loss spikes, or the same run without that batch's update."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import parallel
from data.batch import StepBatch
from k3.construct import unwrap
from recipes.assemble import Parts, assemble
from recipes.config import Config
from recipes.proof.batches import Batches
from recipes.proof.randomise import randomise
from recipes.trainer import Callback, StepResult, Trainer

SPIKE = 5  # the step, from 0, whose loss spikes
STEPS = 8
DIALS = ["optim.guard.min_steps=4", "optim.guard.window=5", "optim.schedule.warmup=0.3", "optim.clip.tau=0.003"]


class LeftOut(Batches):
    """The same stream without the batch of step SPIKE."""

    def __next__(self) -> StepBatch:
        self.position += self.position == SPIKE
        return super().__next__()


class Spoil(Callback):
    """Multiplies one micro-batch's loss at one step of this rank, and its gradient where asked to."""

    def __init__(self, trainer: Trainer, gradient: bool):
        self.share, self.gradient, self.done = trainer.objective.share, gradient, False
        object.__setattr__(trainer.objective, "share", lambda *values: self.spoilt(trainer, *values))

    def spoilt(self, trainer: Trainer, *values: Tensor) -> tuple[Tensor, Tensor]:
        value, parts = self.share(*values)
        if trainer.progress.step == SPIKE and not self.done:
            self.done = True
            return value * 1000 if self.gradient else value, parts * 1000
        return value, parts


class Record(Callback):
    """By step: why it was skipped, and afterwards every tensor that the model and the optimizer would save."""

    def __init__(self, parts: Parts):
        self.parts = parts
        self.reasons: list[str | None] = []
        self.states: list[dict[str, Tensor]] = []
        self.weights: list[dict[str, Tensor]] = []

    def step(self, trainer: Trainer, result: StepResult) -> None:
        self.reasons.append(result.report.reason)
        model = unwrap(trainer.module)
        everything = {**model.state_dict(), **self.parts.optimizer.state_dict()}
        self.states.append({n: t.clone() for n, t in everything.items() if isinstance(t, Tensor)})
        self.weights.append({n: p.detach().clone() for n, p in model.named_parameters()})


def train(cfg: Config, spiking: int | None, gradient: bool = True) -> dict[str, Any]:
    """STEPS steps. `spiking`: the rank whose loss spikes; None: that batch never comes, its step of the schedule passes."""
    world = parallel.start(cfg.parallel, "cpu")
    prove = cfg.prove
    dtype = getattr(torch, prove.dtype.value)
    parts = assemble(cfg.model, cfg.optim, world, dtype=dtype, seed=0, steps=STEPS, prepare=lambda model: randomise(model, 0))
    kind = LeftOut if spiking is None else Batches
    stream = kind(prove, cfg.model.vocab_size, parts.objective.horizon, rank=world.data_rank, of=world.data_size)
    record = Record(parts)
    trainer = Trainer(parts.model, parts.optimizer, stream, parts.objective, callbacks=[record])
    if spiking == world.rank:
        Spoil(trainer, gradient)
    trainer.run(SPIKE)
    if spiking is None:
        parts.optimizer.counters()["step"].add_(1)
        trainer.progress.step += 1
    trainer.run(STEPS)
    return {
        "place": (world.groups.pp.rank(), world.groups.tp.rank()),  # of the weights
        "reasons": record.reasons,
        "states": record.states,
        "weights": record.weights,
        "position": stream.position,
    }
