"""What test_reshard.py has ranks do: write a checkpoint in each of some layouts, and read checkpoints of other layouts.

Weights are drawn by name (k3/init.py), so every layout holds shards of the same ones; the optimizer's state is made from the
weights of the same rank. What is compared after loading therefore owes nothing to the coordinates of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

import k3
import parallel
from optim.config import OptimConfig
from parallel import checkpoint
from parallel.config import ParallelConfig
from parallel.schedule import ParallelModel
from parallel.world import World
from recipes.assemble import Parts, assemble
from recipes.callbacks.checkpoints import providers
from recipes.proof import gather
from recipes.trainer import Trainer

SEED, OTHER = 3, 4
FINE = 1 + 2.0**-12  # a master's difference from its bf16 weight: lost in rounding


def built(layout: ParallelConfig, seed: int) -> tuple[World, Parts, Trainer]:
    """bf16, so that there are masters; EMA balancing, so that balancers have averages."""
    from megatron.core import parallel_state

    # of the layout before: each of its groups has threads, and hundreds of them slow everything down
    for group in [g for g in dist.distributed_c10d._world.pg_map if g is not dist.group.WORLD]:
        dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
    world = parallel.start(layout, "cpu")
    model = k3.preset("tiny")
    model.layers, model.residual_block, model.moe.ema = 5, 2, 0.5
    parts = assemble(model, OptimConfig(), world, dtype=torch.bfloat16, seed=seed, steps=9)
    return world, parts, Trainer(parts.model, parts.optimizer, None, parts.objective)  # type: ignore[arg-type]


def fill(parts: Parts, seed: int) -> None:
    """Gives everything that is no weight a value of its own, the same under every layout."""
    optimizer = parts.optimizer
    for name, shard in parts.model.shards.items():
        if shard.start == shard.stop:
            continue
        if name in optimizer.masters:
            optimizer.masters[name].copy_(shard.weight.float() * FINE)
        for factor, tensors in ((2, optimizer.muon.momentum), (3, optimizer.adamw.exp_avg), (5, optimizer.adamw.exp_avg_sq)):
            if name in tensors:
                tensors[name].copy_(shard.weight * factor)
        if name in optimizer.adamw.updates:
            optimizer.adamw.updates[name].fill_(seed + len(name))
    for name, tensor in (optimizer.counters() | optimizer.guard.tensors()).items():
        tensor.fill_(seed + len(name))
    for balancer in k3.balancing(parts.model.module):
        number = 1 + len(balancer.name) * seed
        balancer.bias.copy_(torch.arange(balancer.bias.numel()) * 0.25 + number)
        balancer.estimate.copy_(-balancer.bias)
        balancer.averaged_steps.fill_(number)


def everything(parts: Parts, world: World) -> dict[str, torch.Tensor]:
    """This rank's weights whole, and the rest as this rank has it."""
    whole = gather.weights(k3.cards(parts.model.module), world)
    balancers = {}
    for balancer in k3.balancing(parts.model.module):
        balancers |= {f"{balancer.name}.{n}": t.clone() for n, t in balancer.state_dict().items()}
    return whole | balancers | {n: t.clone() for n, t in parts.optimizer.state_dict().items()}


def run(
    folder: str, layouts: Mapping[str, ParallelConfig], written: Mapping[str, list[str]] | None, broken: str = ""
) -> list[str]:
    """Writes a checkpoint in every layout (`written` None), or loads those of `written` for each layout: what differs."""
    wrong = []
    for name, layout in layouts.items():
        if written is None:
            world, parts, trainer = built(layout, SEED)
            fill(parts, SEED)
            checkpoint.save(Path(folder) / name, 1, providers(trainer), {"progress": {}}, world)
            continue
        world, parts, trainer = built(layout, SEED)
        fill(parts, SEED)
        expected = everything(parts, world)
        if broken:
            spoil(parts.model)
        for writer in written[name]:
            with torch.no_grad():  # nothing of what is expected is left
                for tensor in (*parts.model.module.parameters(), *parts.model.module.buffers()):
                    tensor.fill_(OTHER)
            fill(parts, OTHER)
            checkpoint.load(Path(folder) / writer / "step_1", providers(trainer), world)
            found = everything(parts, world)
            assert found.keys() == expected.keys()
            wrong += [f"{writer} -> {name}: {key}" for key, tensor in found.items() if not torch.equal(tensor, expected[key])]
        dist.barrier()
    return wrong


def spoil(model: ParallelModel) -> None:
    """Places each part of a cut parameter one element late."""
    from parallel.boxes import Place

    real = Place.pieces
    Place.pieces = lambda self, name, flat, start, local: real(self, name, flat, max(0, start - 1), local)  # type: ignore[method-assign]
