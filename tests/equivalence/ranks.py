"""What single tests run on ranks, beside whole proofs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import k3
import parallel
from data.batch import Batch
from k3.construct import unwrap
from kernels.kda import kda
from parallel.config import ParallelConfig
from parallel.context import StateLink, from_previous, gather_past, stretch
from parallel.schedule import run_step
from recipes.assemble import assemble
from recipes.config import Config
from recipes.proof.batches import Batches
from recipes.proof.randomise import randomise
from recipes.trainer import Trainer


def logits(sizes: dict[str, Any], length: int) -> tuple[Tensor, list[int]]:
    """(logits [2, length, V] of a randomised tiny model, what it generates greedily) in one layout."""
    world = parallel.start(ParallelConfig(**sizes), "cpu")
    model = k3.build(k3.preset("tiny"), world, dtype=torch.float64)
    randomise(model, 0)
    model.eval()
    tokens = torch.randint(0, 256, (2, length), generator=torch.Generator().manual_seed(0))
    starts = torch.zeros(2, length, dtype=torch.bool)
    starts[:, 0] = starts[0, length // 2] = starts[1, length - 2] = True
    with torch.no_grad():
        out = model(tokens, starts)
    text = k3.generate(model, tokens[:1, :7], 5, temperature=0.0)
    return out, text.flatten().tolist()


def reductions_begun(cfg: Config) -> list[tuple[int, int]]:
    """By step: (bucket groups whose reduction was under way when the backward pass had ended, all bucket groups)."""
    world = parallel.start(cfg.parallel, "cpu")
    parts = assemble(cfg.model, cfg.optim, world, dtype=torch.float64, seed=0, steps=cfg.prove.steps)
    seen = []
    finish = parts.model.finish

    def look_first() -> None:
        (ddp,) = parts.model.ddps
        groups = [*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups]
        seen.append((sum(g.grad_reduce_handle is not None for g in groups), len(groups)))
        finish()

    parts.model.finish = look_first  # type: ignore[method-assign]
    stream = Batches(cfg.prove, cfg.model.vocab_size, parts.objective.horizon, rank=world.data_rank, of=world.data_size)
    Trainer(parts.model, parts.optimizer, stream, parts.objective).run(cfg.prove.steps)
    unused = [n for n, p in unwrap(parts.model.module).named_parameters() if not p.main_grad.any()]
    assert {"layers.0.attention_residual.query", "layers.0.attention_residual.norm"} <= set(unused)
    return seen


def context_operations(cp: int, length: int) -> dict[str, Tensor]:
    """Results and gradients of the context operations on this rank's stretch of seeded whole tensors."""
    world = parallel.start(ParallelConfig(cp=cp), "cpu")
    draw = torch.Generator().manual_seed(0)

    def own(*shape: int, dim: int) -> Tensor:
        whole = torch.randn(*shape, generator=draw, dtype=torch.float64)
        return stretch(whole, world, dim).clone().requires_grad_()

    out: dict[str, Tensor] = {}
    x = own(length, 3, dim=0)
    past = gather_past(x, world)
    weights = torch.arange(past.numel(), dtype=torch.float64).view_as(past) * (1 + world.groups.cp.rank())
    (past * weights).sum().backward()
    out |= {"past": past.detach(), "d_past": x.grad}
    y = own(length, 3, dim=0)
    before = from_previous(y[-2:], world)
    (before * (1 + world.groups.cp.rank())).sum().backward()
    out |= {"before": before.detach(), "d_before": y.grad}
    q, k, v, z = (own(2, length, 2, 8, dim=1) for _ in range(4))
    beta = own(2, length, 2, dim=1)
    A_log, dt_bias = torch.zeros(2, dtype=torch.float64), torch.zeros(2, 8, dtype=torch.float64)
    starts = torch.zeros(2, length, dtype=torch.bool)
    starts[:, 0] = starts[1, length // 2] = True
    state = kda(q, k, v, z, beta, A_log, dt_bias, document_starts=stretch(starts, world), link=StateLink(world))[0]
    state.square().sum().backward()
    grads = {f"d_{n}": t.grad for n, t in {"q": q, "k": k, "v": v, "z": z, "beta": beta}.items()}
    return out | {"kda": state.detach()} | {n: g for n, g in grads.items() if g is not None}


def rows_after_a_failure(cfg: Config) -> tuple[int, int]:
    """Micro-batches that rows are kept for: while a step of this rank fails, and afterwards."""
    world = parallel.start(cfg.parallel, "cpu")
    parts = assemble(cfg.model, cfg.optim, world, dtype=torch.float64, seed=0, steps=1)
    model, objective = parts.model, parts.objective
    batches = next(Batches(cfg.prove, cfg.model.vocab_size, objective.horizon)).micro_batches
    during = 0

    def forward(stage: torch.nn.Module, batch: Batch) -> Tensor:
        nonlocal during
        output = objective.forward(stage, batch, cfg.prove.batch * cfg.prove.length)
        # the first rank fails after it has sent the first micro-batch, the second with that: nobody waits for a message
        if batch is batches[1 - world.rank]:
            during = len(model.rows)
            raise ValueError("on purpose")
        return output

    with pytest.raises(ValueError, match="on purpose"):
        run_step(model, batches, forward, lambda _, losses: objective.share(losses, torch.ones(2)))
    return during, len(model.rows)


def gradient_bytes(cfg: Config) -> tuple[list[int], list[int]]:
    """(bytes of all tensors that hold gradients, before each backward pass of a stage and after the step; the bytes of each
    stage's own gradient buffers, which ZeRO-2 gives back).
    """
    world = parallel.start(cfg.parallel, "cpu")
    parts = assemble(cfg.model, cfg.optim, world, dtype=torch.float64, seed=0, steps=1)
    model, objective, seen = parts.model, parts.objective, list[int]()
    buffers = [[*ddp.buffers, *ddp.expert_parallel_buffers] for ddp in model.ddps]

    def count(*_: Any) -> None:
        parameters = list(model.module.parameters())
        found = [g for p in parameters for g in (p.grad, getattr(p, "main_grad", None))]
        found += [shard.gradient for shard in model.shards.values()]
        found += [b.grad_data for of in buffers for b in of] + [k.grad_data for of in buffers for b in of for k in b.buckets]
        if model.zero2 is not None:
            found += [slot.memory for slot in model.zero2.turns.slots]
        storages = {id(t) if t.is_meta else t.untyped_storage().data_ptr(): t for t in found if t is not None}
        seen.append(sum(0 if t.is_meta else t.untyped_storage().nbytes() for t in storages.values()))

    def forward(stage: torch.nn.Module, batch: Batch) -> Tensor:
        output = objective.forward(stage, batch, cfg.prove.batch * cfg.prove.length * cfg.prove.accumulation)
        output.register_hook(count)
        return output

    batches = next(Batches(cfg.prove, cfg.model.vocab_size, 2, rank=world.data_rank, of=world.data_size)).micro_batches
    model.zero_grad()
    run_step(model, batches, forward, lambda _, losses: objective.share(losses, torch.ones(2)))
    count()
    return seen, [sum(b.grad_data.numel() * b.grad_data.element_size() for b in of) for of in buffers]
