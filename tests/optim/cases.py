"""Small models of cards: every kind of logical matrix, and what AdamW trains, without the real layers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from optim.optimizer import Optimizer as Trained
from parallel.cards import Blocks, Card, CardTable, Optimizer, Placement, Published, TensorAxis, fused, heads, not_a_matrix, whole

HEADS, WIDTH, EXPERTS = 4, 32, 3
# name -> (shape, blocks, role); no blocks: AdamW without decay
KINDS: dict[str, tuple[tuple[int, ...], Blocks, str]] = {
    "layers.0.q.weight": ((HEADS * 8, WIDTH), heads(("query", 8)), "attention"),
    "layers.0.kv.weight": ((HEADS * 12, WIDTH), heads(("key", 8), ("value", 4)), "attention"),
    "layers.0.o.weight": ((WIDTH, HEADS * 8), whole(WIDTH), "attention"),
    "layers.0.gate_up.weight": ((40, WIDTH), fused(("gate", 20), ("up", 20)), "dense"),
    "layers.0.experts.weight": ((EXPERTS, 24, WIDTH), fused(("gate", 12), ("up", 12), per_expert=True), "expert"),
    "layers.0.router.weight": ((EXPERTS, WIDTH), whole(EXPERTS), "router"),
    "layers.0.norm.weight": ((WIDTH,), not_a_matrix(), "norm"),
}


def card(name: str, shape: tuple[int, ...], blocks: Blocks, role: str, optimizer: Optimizer | None = None) -> Card:
    kind = optimizer or (Optimizer.MUON if blocks.is_matrix else Optimizer.ADAMW)
    return Card(name, (Published(name),), shape, blocks, Placement(TensorAxis.ROWS), kind, decay=blocks.is_matrix, role=role)


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, torch.nn.Parameter]:
    gen = torch.Generator().manual_seed(seed)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype))
        for name, (shape, _, _) in KINDS.items()
    }


def table(tensors: dict[str, torch.nn.Parameter]) -> CardTable:
    bound: dict[str, Tensor] = dict(tensors)
    return CardTable({name: card(name, *KINDS[name]) for name in tensors}, bound)


def give_gradients(tensors: dict[str, torch.nn.Parameter], seed: int, scale: float = 1.0) -> None:
    gen = torch.Generator().manual_seed(seed)
    for p in tensors.values():
        p.grad = (torch.randn(p.shape, generator=gen, dtype=torch.float64) * scale).to(p.dtype)


@torch.no_grad()
def take_over(optimizer: Trained, saved: Mapping[str, Tensor]) -> None:
    """What loading a checkpoint of this very layout does."""
    state = optimizer.state_dict()
    assert state.keys() == saved.keys()
    for name, tensor in state.items():
        tensor.copy_(saved[name])
    optimizer.loaded()
