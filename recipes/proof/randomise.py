"""Random values for every parameter and router bias: zeros and ones hide bugs."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

import k3
from k3.init import shard
from parallel.cards import Card

# Standard deviation of what is added to a first value, by the rule that drew it: enough to be seen, and little enough that
# rounding is not amplified from layer to layer (sharp residual mixes do).
SPREAD = {"last": 0.02, "normal": 0.0, "conv": 0.0, "dt_bias": 0.5, "ones": 0.2, "zeros": 0.1}
ROUTER_BIAS = 0.01  # uneven loads, and tokens for every expert


@torch.no_grad()
def randomise(model: k3.Model, seed: int) -> None:
    """Moves everything off its first value: queries, norms, A_log, dt_bias and router biases included.

    As first values are, noise is drawn whole from (seed, name), and every rank takes its shard: all layouts begin alike.
    """
    table = k3.cards(model)
    for name, card in table.items():
        spread = ROUTER_BIAS if card.role == "router bias" else SPREAD[card.init]
        if not spread:
            continue
        if card.blocks.per_expert:
            raise ValueError(f"{name}: expert weights that begin at {card.init!r} have no rule here")
        target = table.tensor(name)
        target += (shard(_noise(card, seed), card, model.world) * spread).to(target.dtype)


def _noise(card: Card, seed: int) -> Tensor:
    digest = hashlib.sha256(f"noise:{seed}:{card.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(card.shape, generator=generator, dtype=torch.float64)
