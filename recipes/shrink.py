"""`k3 prove recipe=NAME`: a recipe's layout and switches at sizes that eight processes of one machine can run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from math import gcd
from typing import Any

from k3.activations import ActivationConfig
from k3.config import K3Config
from k3.presets import tiny
from parallel.config import ParallelConfig, sequence_parallel
from parallel.stages import stage_count
from recipes.config import leaves
from recipes.errors import shown

MOST = 8  # processes of a proof


def shrunk(recipe: str) -> list[str]:
    """The words of `k3 prove` for a recipe: each axis it uses at two ranks, as far as eight allow, the model at tiny's sizes."""
    from recipes.compose import compose

    cfg = compose([f"recipe={recipe}"], job="estimate")
    layout = _layout(cfg.parallel)
    model = _model(cfg.model, layout)
    layout = replace(layout, ep=gcd(layout.ep, model.moe.experts) if model.moe.experts else 1)
    words = [*_changed("model", model, tiny()), *_changed("parallel", layout, ParallelConfig())]
    words += _changed("activations", cfg.activations, ActivationConfig())
    words += [f"optim.name={cfg.optim.name.name}", f"optim.muon.per_head={shown(cfg.optim.muon.per_head)}"]
    return [*words, f"prove.accumulation={max(2, layout.pp)}"]


def _layout(p: ParallelConfig) -> ParallelConfig:
    """Pipelines first, then context, tensor and data ranks, while there are processes left; experts over all of them."""
    left = MOST
    sizes: dict[str, Any] = {}
    for axis, size in (("pp", p.pp), ("cp", p.cp), ("tp", p.tp), ("dp", p.dp or 1)):
        sizes[axis] = 2 if size > 1 and left >= 2 else 1
        left //= sizes[axis]
    inner = sizes["cp"] * sizes["tp"] * sizes["dp"]
    vpp = min(p.vpp, 2) if sizes["pp"] > 1 else 1
    zero = p.zero if p.zero < 2 or (vpp > 1 and sizes["cp"] * sizes["dp"] > 1) else 1
    return replace(
        p, **sizes, sp=sequence_parallel(p) if sizes["tp"] > 1 else None, ep=min(p.ep, inner), vpp=vpp, split=None, group=None,
        bucket=None, zero=zero, offload_gradients=p.offload_gradients and zero == 2, overlap_warmup=p.overlap_warmup and vpp > 1,
    )  # fmt: skip


def _model(c: K3Config, layout: ParallelConfig) -> K3Config:
    """Every switch of `c`, the widths of model=tiny, and at least two layers a stage."""
    small = tiny()
    layers = max(small.layers if stage_count(layout) > 1 else 5, 2 * stage_count(layout) + 1)
    return replace(
        c, vocab_size=small.vocab_size, hidden_size=small.hidden_size, layers=layers, dense_layers=min(c.dense_layers, 1),
        dense_size=small.dense_size, residual_block=small.residual_block, init_std=small.init_std,
        mtp_layers=min(c.mtp_layers, 1),
        kda=replace(c.kda, heads=small.kda.heads, head_dim=small.kda.head_dim),
        mla=replace(
            small.mla, q_lora_rank=None if c.mla.q_lora_rank is None else small.mla.q_lora_rank, output_gate=c.mla.output_gate
        ),
        moe=c.moe if not c.moe.experts else replace(
            c.moe, experts=small.moe.experts, top_k=small.moe.top_k, latent_size=small.moe.latent_size,
            expert_size=small.moe.expert_size, shared_experts=min(c.moe.shared_experts, 2),
        ),
    )  # fmt: skip


def _changed[Section: (K3Config, ParallelConfig, ActivationConfig)](name: str, value: Section, default: Section) -> Iterator[str]:
    usual = dict(leaves(default))
    for key, one in leaves(value):
        if one != usual[key]:
            yield f"{name}.{key}={one.name if isinstance(one, Enum) else shown(one)}"
