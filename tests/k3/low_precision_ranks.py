"""What a rank of tests/k3/test_low_precision.py runs: one training batch by either provider."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import k3
import parallel
from k3.activations import ActivationConfig
from k3.config import K3Config, KDAConfig, MLAConfig, MoEConfig
from k3.low_precision import LowPrecision
from k3.model import Model
from parallel.config import ParallelConfig
from parallel.world import World
from recipes.proof.randomise import randomise
from tests.k3 import te_standin


def config(**changes: Any) -> K3Config:
    """Every kind of layer on a grid of 32: dense KDA, KDA and MLA with experts, and MTP."""
    small = K3Config(
        vocab_size=96, hidden_size=64, layers=4, dense_size=96, residual_block=2, init_std=0.05, mtp_layers=1,
        kda=KDAConfig(heads=2, head_dim=32),
        mla=MLAConfig(heads=2, q_lora_rank=32, kv_lora_rank=32, nope_dim=32, rope_dim=32, v_dim=32),
        moe=MoEConfig(experts=4, top_k=2, latent_size=32, expert_size=32),
    )  # fmt: skip
    return replace(small, **changes)


def built(
    kind: LowPrecision | None, dtype: torch.dtype, world: World | None = None, activations: ActivationConfig | None = None,
    model: K3Config | None = None,
) -> Model:  # fmt: skip
    out = k3.build(model or config(), world, dtype=dtype, activations=activations, low_precision=kind)
    randomise(out, 0)
    return out.train()


def batch(length: int = 32) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    tokens, labels = (torch.randint(0, 96, (2, length), generator=draw) for _ in range(2))
    starts = torch.zeros(2, length, dtype=torch.bool)
    starts[:, 0] = starts[0, 11] = starts[1, 5] = starts[1, 6] = True
    return {"tokens": tokens, "labels": labels, "document_starts": starts}


def losses_and_gradients(model: Model, length: int = 32) -> tuple[Tensor, dict[str, Tensor]]:
    losses = model(**batch(length))
    losses.sum().backward()
    return losses.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def both(sizes: dict[str, Any], kinds: Sequence[LowPrecision | None]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Losses and gradients by each kind in one layout, on this rank."""
    world = parallel.start(ParallelConfig(**sizes), "cpu")
    with te_standin.installed():
        return [losses_and_gradients(built(kind, torch.float64, world)) for kind in kinds]
