"""`k3 bench traffic`: bytes on the context and expert axes, counted on two ranks of this machine (they depend on sizes alone)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import k3
from k3.config import Balance, K3Config, MoEConfig
from parallel.config import ParallelConfig
from parallel.local import Helper
from recipes.console import say

LENGTHS = (128, 512)  # tokens


def run() -> None:
    """Prints what one KDA layer sends over two context ranks, and one LatentMoE layer over two expert ranks."""
    with Helper() as helper:
        for line in table(helper):
            say(line)


def table(helper: Helper) -> Iterator[str]:
    yield "bytes of one forward and backward pass over 2 rows a data rank, both ranks together, float32, sizes of model=nano"
    yield f"{'':<42}" + "".join(f"{length:>12} tokens" for length in LENGTHS)
    context, expert = ParallelConfig(cp=2, dp=1), ParallelConfig(ep=2, dp=2)
    one, two = kda_layers(1), kda_layers(2)
    kda = [sent(helper, two, context, "context", n) - sent(helper, one, context, "context", n) for n in LENGTHS]
    yield _row("context axis, a KDA layer", kda)
    latents = [sent(helper, one_moe_layer(latent=True), expert, "expert", length) for length in LENGTHS]
    full = [sent(helper, one_moe_layer(latent=False), expert, "expert", length) for length in LENGTHS]
    yield _row("expert axis, a MoE layer with latents", latents)
    yield _row("expert axis, model.latent=false", full)
    yield f"{'latents of full width':<42}" + "".join(f"{a / b:>19.3f}" for a, b in zip(latents, full))


def sent(helper: Helper, model: K3Config, layout: ParallelConfig, axis: str, length: int) -> int:
    """Bytes on one axis, of both ranks together."""
    traffic = helper.run_ranks("recipes.proof.one_pass:on_rank", 2, model, layout, length)[0]
    return sum(traffic.get(axis, {}).values())


def kda_layers(count: int) -> K3Config:
    """`count` KDA layers and, as every model ends in one, an MLA layer; no experts."""
    without = MoEConfig(experts=0, balance=Balance.none)
    layers = count + 1
    return dataclasses.replace(k3.preset("nano"), layers=layers, dense_layers=layers, mtp_layers=0, moe=without, latent=False)


def one_moe_layer(*, latent: bool) -> K3Config:
    """A dense layer and a MoE layer, which sees and routes the same tokens with and without latents."""
    return dataclasses.replace(k3.preset("nano"), layers=2, mtp_layers=0, latent=latent)


def _row(name: str, values: list[int]) -> str:
    return f"{name:<42}" + "".join(f"{value:>19,}" for value in values)
