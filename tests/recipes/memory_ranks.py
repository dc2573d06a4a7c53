"""What the ranks of test_estimate.py run: a layout's real objects, and what its schedule really holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import parallel
from data.batch import Batch
from k3.config import K3Config
from optim.optimizer import Optimizer
from parallel.config import ParallelConfig
from parallel.schedule import run_step
from parallel.world import World
from recipes.assemble import Parts, assemble
from recipes.config import Config
from tests.k3.held import Watch, beside, stages_held


def parts_of(cfg: Config, dtype: torch.dtype) -> tuple[World, Parts]:
    world = parallel.start(cfg.parallel)
    return world, assemble(cfg.model, cfg.optim, world, dtype=dtype, seed=0, steps=10)


def state(cfg: Config, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of this rank's parameters, of its gradient buffers, of the parameters' places in them, and of its optimizer state."""
    _, parts = parts_of(cfg, dtype)
    parameters = list(parts.model.module.parameters())
    buffers = [b for ddp in parts.model.ddps for b in (*ddp.buffers, *ddp.expert_parallel_buffers)]
    return {
        "parameters": sum(p.numel() for p in parameters),
        "weights": sum(p.nbytes for p in parameters),
        "gradients": sum(p.main_grad.nbytes for p in parameters),
        "buffers": sum(b.grad_data.nbytes for b in buffers),
        "optimizer": _state_bytes(parts.optimizer),
        "buckets": sum(len(b.buckets) for b in buffers),
        "tensors": len(parameters),
    }


def _state_bytes(optimizer: Optimizer) -> int:
    """Of masters and moments; the state dict leaves out masters that repeat the weights."""
    tensors = {n: t for n, t in optimizer.state_dict().items() if t.dim() and not n.startswith("guard.")}
    return sum(t.nbytes for t in (tensors | {f"{n}.master": t for n, t in optimizer.masters.items()}).values())


def pipeline(cfg: Config, dtype: torch.dtype, micro_batches: list[Batch]) -> dict[str, Any]:
    """One step: bytes held after each forward pass by its stage, and most bytes saved at once, over all stages of the rank."""
    _, parts = parts_of(cfg, dtype)
    known: list[Tensor] = [*parts.model.module.parameters()]
    for batch in micro_batches:
        known += [batch.tokens, batch.labels, batch.document_starts, batch.loss_mask]
    watches: list[Watch] = []
    each: dict[int, int] = {}
    peaks: list[int] = []

    def forward(stage: Any, batch: Batch) -> Tensor:
        rows = parts.model.rows
        kept = [kept.row for kept in rows._kept.get(rows.micro_batch, [])] if rows else []  # held by the stages that made them
        with Watch([*known, *kept]) as watch:
            out = parts.objective.forward(stage, batch, 1)
        watches.append(watch)
        number = stage.module.number
        each[number] = max(each.get(number, 0), sum(watch.storages(beside(out.grad_fn)).values()))
        peaks.append(sum({place: size for w in watches for place, size in w.storages().items()}.values()))
        return out

    denominators = parts.objective.denominators(micro_batches)
    parts.model.module.train()
    run_step(parts.model, micro_batches, forward, lambda _, losses: parts.objective.share(losses, denominators))
    return {"each": each, "peak": max(peaks)}


def batches(cfg: Config, count: int, rows: int, seed: int = 0) -> list[Batch]:
    """Of one document a row."""
    draw, length = torch.Generator().manual_seed(seed), cfg.data.seq_length
    out = []
    for _ in range(count):
        tokens = torch.randint(0, cfg.model.vocab_size, (rows, length), generator=draw)
        starts = torch.zeros(rows, length, dtype=torch.bool)
        starts[:, 0] = True
        mask = torch.ones(1 + cfg.model.mtp_layers, rows, length, dtype=torch.bool)
        out.append(Batch(tokens, tokens.roll(-1, 1), starts, mask))
    return out


def layout_held(config: K3Config, layout: ParallelConfig, dtype: torch.dtype, batch: dict[str, Any]) -> int:
    """Bytes that this rank holds of the whole model."""
    (found,) = stages_held(config, parallel.start(layout), dtype, [range(config.layers)], 1, batch)
    return found
