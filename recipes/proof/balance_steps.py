"""What `k3 bench balance` runs on its ranks: one router a rule, fed tokens of as many domains as there are ranks.

Legend: N tokens of a micro-batch, d hidden, E experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import k3
import parallel
from k3.backend import megatron_config
from k3.balance import Balancing
from k3.config import Balance, K3Config
from k3.context import Context
from k3.router import Router
from parallel.config import ParallelConfig
from parallel.world import World

WIDTH, EXPERTS, TOP_K = 64, 32, 4
TOKENS, MICRO_BATCHES = 512, 2  # of a micro-batch; of a domain in a step
SKEW = 0.6  # of a domain's mean against its tokens' own spread; as much of both is common to all domains


@dataclass(frozen=True)
class Curve:
    """One rule on one rank. `before_pooling` [E] are this rank's own counts of the first step."""

    loads: list[list[int]]  # by step, of each expert: of all ranks' tokens
    biases: list[list[float]]  # after each step
    before_pooling: list[int]

    def max_over_mean(self) -> list[float]:
        return [uneven(load) for load in self.loads]


def on_rank(rules: Sequence[Balance], domains: int, steps: int) -> dict[str, Curve]:
    """The curves of every rule over `steps` steps. Rank r of n takes every n-th of the domains, from number r."""
    world = parallel.start(ParallelConfig(dp=torch.distributed.get_world_size()), "cpu")
    own = range(world.data_rank, domains, world.data_size)
    routers = {rule: _router(rule, world) for rule in rules}
    found: dict[Balance, Curve] = {rule: Curve([], [], []) for rule in rules}
    for step in range(steps):
        batches = [tokens(domain, step, number) for domain in own for number in range(MICRO_BATCHES)]
        for rule, router in routers.items():
            for x_Nd in batches:
                _, weights = router(x_Nd, Context(torch.ones(1, TOKENS, dtype=torch.bool), TOKENS))
                weights.sum().backward()  # counts are taken here
            balancer = router.balancer
            if step == 0:
                found[rule].before_pooling.extend(balancer.counting.tolist())
            Balancing([balancer], world).update()
            found[rule].loads.append(balancer.load.tolist())
            found[rule].biases.append(balancer.bias.tolist())
    return {rule.value: curve for rule, curve in found.items()}


def tokens(domain: int, step: int, number: int) -> Tensor:
    """[N, d]: a micro-batch. Its domain, and all domains together, lean to some directions and so to some experts."""
    return _normal(1, domain + 2, step, number, rows=TOKENS) + SKEW * (_normal(0, domain) + _normal(0, 1000))


def uneven(load: Sequence[int]) -> float:
    """Largest load over the mean load."""
    return max(load) * len(load) / sum(load)


def _router(rule: Balance, world: World) -> Router:
    config = sizes(rule)
    router = Router(config, megatron_config(config, world, torch.float32), world)
    with torch.no_grad():
        router.weight.copy_(_normal(2, rows=EXPERTS) * WIDTH**-0.5)
    return router.train()


def sizes(rule: Balance) -> K3Config:
    """The tiny model with these experts: its other dials (bins, bias_step) are the defaults that a user gets."""
    tiny = k3.preset("tiny")
    return dataclasses.replace(
        tiny, hidden_size=WIDTH, moe=dataclasses.replace(tiny.moe, experts=EXPERTS, top_k=TOP_K, balance=rule)
    )


def _normal(*key: int, rows: int = 1) -> Tensor:
    """[rows, d], drawn from a generator that `key` alone determines: the same on whatever rank."""
    seed = 0
    for part in key:
        seed = (seed * 1_000_003 + part + 1) % 2**63
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))
