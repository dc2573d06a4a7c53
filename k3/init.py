"""First values of every parameter, by the rule on its card (spec 2.6, 6.3).

Each tensor is drawn whole from a generator seeded by (seed, its name), experts one by one, and every rank keeps its shard: the
same model comes out of every layout, and nothing depends on the order of construction.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection

import torch
from torch import Tensor

from parallel.cards import Card, CardTable, TensorAxis
from parallel.world import World


@torch.no_grad()
def draw(table: CardTable, *, seed: int, std: float, world: World, only: Collection[str] | None = None) -> None:
    """Fills every parameter and buffer of the table in place; all memory is overwritten, whatever it held.

    only: the names of those to fill; None: all.
    """
    for name, card in table.items():
        if only is not None and name not in only:
            continue
        target = table.tensor(name)
        if target.is_meta:
            continue
        if card.blocks.per_expert:
            first = world.groups.ep.rank() * target.shape[0]
            for local in range(target.shape[0]):
                target[local].copy_(_value(card, f"{name}.{first + local}", card.shape[1:], seed, std))
        else:
            target.copy_(shard(_value(card, name, card.shape, seed, std), card, world))


def shard(whole: Tensor, card: Card, world: World) -> Tensor:
    """This tensor rank's part of a whole tensor."""
    axis = {TensorAxis.ROWS: 0, TensorAxis.COLS: 1}.get(card.placement.tensor)
    if axis is None:
        return whole
    return whole.chunk(world.groups.tp.size(), dim=axis)[world.groups.tp.rank()]


def _value(card: Card, key: str, shape: tuple[int, ...], seed: int, std: float) -> Tensor:
    """float64 on the CPU, so that precision and device change the draw by rounding only."""
    if card.init == "ones":
        return torch.ones(shape, dtype=torch.float64)
    if card.init == "zeros":
        return torch.zeros(shape, dtype=torch.float64)
    if card.init == "last":  # of the inputs side by side, the last one passes through as it is
        whole = torch.zeros(shape, dtype=torch.float64)
        whole[:, -shape[0] :].fill_diagonal_(1.0)
        return whole
    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    if card.init == "normal":
        return torch.empty(shape, dtype=torch.float64).normal_(0.0, std, generator=generator)
    if card.init == "conv":  # PyTorch's default for a depthwise filter of this width
        bound = 1 / math.sqrt(shape[-1])
        return torch.empty(shape, dtype=torch.float64).uniform_(-bound, bound, generator=generator)
    if card.init == "dt_bias":  # inverse softplus of a log-uniform time step, as Kimi Linear and Mamba-2
        low, high = math.log(1e-3), math.log(1e-1)
        dt = torch.empty(shape, dtype=torch.float64).uniform_(low, high, generator=generator).exp().clamp_min(1e-4)
        return dt + torch.log(-torch.expm1(-dt))
    raise ValueError(f"{key}: no rule named {card.init!r} to draw its first value")
