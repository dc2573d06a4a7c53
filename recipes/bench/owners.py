"""`k3 bench owners`: what a step of Per-Head Muon sends and holds where ZeRO cuts its matrices, by owners and in the naive form.

Counted on processes of this machine. It depends on sizes alone, so one Newton-Schulz step does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import k3
import optim
import parallel
from k3.config import K3Config
from k3.construct import build, cards
from optim.config import Distribution, MuonConfig, OptimConfig
from parallel.config import ParallelConfig
from parallel.local import Helper
from parallel.traffic import Traffic
from recipes.console import say
from recipes.live_bytes import LiveBytes

REPLICAS = (2, 4, 8)
LAYERS = 6
BUCKET = 1_500_000  # parameters: several buckets, as a pipeline's virtual stages are


@dataclass(frozen=True)
class Measured:
    """One rank's step. All sizes in bytes of float32 masters."""

    total: int  # all matrices of the model
    sent: int
    owned: int  # the matrices that this rank orthogonalises
    buffer: int  # the largest gradient bucket
    peak: int  # tensors that exist during the step alone
    imbalance: float  # max/mean FLOPs over ranks
    cut: int
    given: int
    matrices: int


def run() -> None:
    """Prints both forms at every number of replicas."""
    with Helper() as helper:
        for line in table(helper):
            say(line)


def table(helper: Helper, replicas: Sequence[int] = REPLICAS) -> Iterator[str]:
    """The lines of `k3 bench owners`; also called by `k3 bench muon`."""
    yield (
        f"Per-Head Muon of model=nano with {LAYERS} layers over data-parallel ranks, ZeRO-1; the rank with most, in MB; bounds: "
        "sent 2 total/DP, memory owned matrices + one chunk buffer, FLOPs 1.1"
    )
    yield (
        f"{'DP':>2} {'form':<7}{'sent':>8}{'2 total/DP':>12}{'of total/DP':>13}{'FLOPs max/mean':>16}{'peak memory':>13}"
        f"{'owned + chunk':>15}{'cut':>6}{'given':>7}{'matrices':>10}"
    )
    for size in replicas:
        for form in Distribution:
            ranks: list[Measured] = helper.run_ranks("recipes.bench.owners:on_rank", size, model(), size, form)
            one, sent = ranks[0], max(rank.sent for rank in ranks)
            worst = max(ranks, key=lambda rank: rank.peak / (rank.owned + rank.buffer))
            yield (
                f"{size:>2} {form.value:<7}{sent / 1e6:>8.2f}{2 * one.total / size / 1e6:>12.2f}{sent * size / one.total:>13.2f}"
                f"{one.imbalance:>16.3f}{worst.peak / 1e6:>13.2f}{(worst.owned + worst.buffer) / 1e6:>15.2f}{one.cut:>6}"
                f"{one.given:>7}{one.matrices:>10}"
            )


def model() -> K3Config:
    return dataclasses.replace(k3.preset("nano"), layers=LAYERS)


def on_rank(config: K3Config, size: int, form: Distribution) -> Measured:
    """One step of a rank among `size` data-parallel ones."""
    torch.manual_seed(0)
    world = parallel.start(ParallelConfig(dp=size, bucket=BUCKET), "cpu")
    module = build(config, world)
    table = cards(module)
    wrapped = parallel.wrap(module, table, world)
    settings = OptimConfig(muon=MuonConfig(steps=1, distribution=form))
    muon = optim.build(settings, table, steps=1, shards=wrapped.shards).muon
    parts = {name: shard for name, shard in wrapped.shards.items() if shard.start < shard.stop}
    gradients: dict[str, Any] = {name: torch.randn_like(shard.weight) for name, shard in parts.items()}
    weights = {name: shard.weight for name, shard in parts.items()}
    with Traffic(world) as traffic:
        muon.step(weights, gradients, lr=0.01, decay=0.0, scale=1.0)
    with LiveBytes() as live:
        muon.step(weights, gradients, lr=0.01, decay=0.0, scale=1.0)
    assert muon.balance is not None
    buffers = [buffer for ddp in wrapped.ddps for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers)]
    buckets = [bucket for buffer in buffers for bucket in buffer.buckets]
    return Measured(
        total=4 * sum(wrapped.shards[name].parameter.numel() for name in muon.rows),
        sent=sum(sum(collectives.values()) for collectives in traffic.bytes.values()),
        owned=4 * muon.plan.elements,
        buffer=max(bucket.grad_data.nbytes for bucket in buckets),
        peak=live.peak,
        imbalance=muon.balance.imbalance,
        cut=muon.plan.cut,
        given=muon.plan.given,
        matrices=muon.plan.matrices,
    )
