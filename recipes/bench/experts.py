"""`k3 bench experts`: the grouped experts against megatron-core's SequentialMLP, forward and backward, dispatch left out.

Both sides compute the same numbers (checked first) from the same weights with the same activation, take turns, and run under
one allocator setting. Medians of wall time.
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import parallel
from kernels.experts import grouped_mlp
from kernels.situ import situ_glu, swiglu
from parallel.world import World
from recipes.console import say
from recipes.launch import ALLOCATOR
from recipes.summary import versions

EXPERTS, LATENT, WIDTH, TOKENS, TOP_K = 64, 64, 96, 2048, 4
WARM_UP, ROUNDS = 3, 31
ACTIVATIONS: dict[str, Callable[..., Tensor]] = {"situ": situ_glu, "swiglu": swiglu}


class _OnFused(nn.Module):
    """A gated activation as megatron-core's MLP calls a module: on gate and up in one tensor."""

    def __init__(self, activation: Callable[..., Tensor]):
        super().__init__()
        self.activation = activation

    def forward(self, fused: Tensor) -> Tensor:
        return self.activation(*fused.chunk(2, -1))


def sequential(world: World, activation: Callable[..., Tensor], gate_up: Tensor, down: Tensor) -> nn.Module:
    """megatron-core's SequentialMLP with these weights."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.transformer_config import TransformerConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice on routers and graphs, which are not part of this
        config = TransformerConfig(
            num_layers=1, hidden_size=LATENT, num_attention_heads=1, ffn_hidden_size=WIDTH, moe_ffn_hidden_size=WIDTH,
            num_moe_experts=EXPERTS, moe_router_topk=TOP_K, add_bias_linear=False, gated_linear_unit=True,
            use_cpu_initialization=True, bias_activation_fusion=False,
        )  # fmt: skip
    # set afterwards: the constructor ties this hook to Transformer Engine, the module itself calls whatever it was given
    config.use_te_activation_func = True
    submodules = MLPSubmodules(
        linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear, activation_func=lambda config: _OnFused(activation)
    )
    module = SequentialMLP(EXPERTS, config, submodules, pg_collection=world.groups).to(world.device)
    with torch.no_grad():
        for expert, first, second in zip(module.local_experts, gate_up, down):
            expert.linear_fc1.weight.copy_(first)
            expert.linear_fc2.weight.copy_(second)
    return module


def _loads(generator: torch.Generator) -> Tensor:
    """Tokens of each expert where every token draws TOP_K different experts at random."""
    chosen = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K, -1).indices
    return torch.bincount(chosen.flatten(), minlength=EXPERTS)


def compare(world: World, name: str) -> dict[str, Any]:
    """Median milliseconds of both sides with one activation. Raises RuntimeError if they disagree on any number."""
    generator = torch.Generator().manual_seed(0)
    counts, activation = _loads(generator), ACTIVATIONS[name]
    rows = int(counts.sum())
    x, d_out = (torch.randn(rows, LATENT, generator=generator) for _ in range(2))
    gate_up = (torch.randn(EXPERTS, 2 * WIDTH, LATENT, generator=generator) * LATENT**-0.5).requires_grad_()
    down = (torch.randn(EXPERTS, LATENT, WIDTH, generator=generator) * WIDTH**-0.5).requires_grad_()
    probs = torch.rand(rows, generator=generator).requires_grad_()
    x.requires_grad_()
    module = sequential(world, activation, gate_up.detach(), down.detach())
    theirs = list(module.parameters())

    def grouped_side() -> list[Tensor]:
        out = grouped_mlp(x, counts, gate_up, down, activation, probs)
        return [out.detach(), *torch.autograd.grad(out, (x, probs, gate_up, down), d_out)]

    def sequential_side() -> list[Tensor]:
        out = module(x, counts, probs)[0]
        return [out.detach(), *torch.autograd.grad(out, (x, probs, *theirs), d_out)]

    ours, other = grouped_side(), sequential_side()
    other[3:] = [torch.stack(other[3::2]), torch.stack(other[4::2])]
    for label, a, b in zip(("output", "d x", "d probs", "d gate_up", "d down"), ours, other):
        if not torch.allclose(a, b, rtol=1e-4, atol=1e-4):
            raise RuntimeError(f"bench experts: {label} differs by {(a - b).abs().max():.2e} between the two sides")

    seconds: dict[str, list[float]] = {"grouped": [], "sequential": []}
    for turn in range(WARM_UP + ROUNDS):
        for side, call in (("grouped", grouped_side), ("sequential", sequential_side)):
            began = time.perf_counter()
            call()
            if turn >= WARM_UP:
                seconds[side].append(time.perf_counter() - began)
    medians = {side: 1e3 * statistics.median(taken) for side, taken in seconds.items()}
    load = counts.max().item() / counts.float().mean().item()
    return {"activation": name, "max_over_mean_load": load, **medians, "ratio": medians["sequential"] / medians["grouped"]}


def run() -> None:
    """Prints the comparison in float32 for each activation."""
    say(", ".join(f"{name} {value}" for name, value in versions().items()))
    say("allocator: " + (", ".join(f"{n}={os.environ[n]}" for n in ALLOCATOR if n in os.environ) or "as the system has it"))
    say(f"{EXPERTS} experts, latent {LATENT}, width {WIDTH}, {TOKENS} tokens top-{TOP_K}, float32, forward and backward")
    world = parallel.start()
    try:
        results = [compare(world, name) for name in ACTIVATIONS]
    finally:
        parallel.stop()
    for r in results:
        say(
            f"{r['activation']:<7} load max/mean {r['max_over_mean_load']:.2f}: grouped {r['grouped']:.1f} ms, "
            f"SequentialMLP {r['sequential']:.1f} ms, {r['ratio']:.1f}x (medians of {ROUNDS})"
        )


if __name__ == "__main__":
    run()
