"""Builds a model for this rank and finds its parts by what they do."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from k3.activations import ActivationConfig
from k3.backend import megatron_config
from k3.balance import Balancer, Balancing
from k3.builder import Builder, Provider
from k3.cards import describe
from k3.config import ConfigError, K3Config
from k3.init import draw
from k3.low_precision import LowPrecision, off_grid
from k3.mla import MLA
from k3.model import Model
from k3.qat import QatConfig, refusals
from k3.residual import ReadBlocks
from k3.router import Router
from parallel.attributes import mark
from parallel.cards import Card, CardTable
from parallel.clip import ClipTarget
from parallel.world import World, start


def build(
    config: K3Config,
    world: World | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str | None = None,
    activations: ActivationConfig | None = None,
    low_precision: LowPrecision | None = None,
    qat: QatConfig | None = None,
    draw_values: bool = True,
) -> Model:
    """This rank's part of the model, every parameter drawn from `seed` by name.

    `dtype` is float32, bfloat16 or float64; what the release keeps in fp32 stays so under bfloat16. device="meta" builds the
    shapes alone (for counting). `world` defaults to a single process, `activations` to saving all for the backward pass.
    `low_precision`: Transformer Engine builds what the cards say and quantises there (k3/builder.py); None: nothing.
    `qat`: what the routed experts' products read (k3/qat.py); None: their weights and inputs as they are.
    draw_values=False leaves parameters and router biases unset, for who fills every one. Raises ConfigError for a contradictory
    configuration, or one whose matrices the low precision or `qat` cannot take.
    """
    config.validate()
    if wrong := list(refusals(config, qat, low_precision) if qat else ()):
        raise ConfigError("\n".join(f"{key}={value}: {text}" for key, value, text in wrong))
    world = world or start()
    megatron = megatron_config(config, world, dtype)
    with torch.device(device or world.device):
        build = Builder(megatron, world, describe(config), _provider(config, low_precision, world), qat=qat)
        model = Model(config, build, activations or ActivationConfig())
    for name, module in model.named_modules():
        if isinstance(module, Balancer):
            module.name = name.removesuffix(".feed_forward.router.balancer")
    table = cards(model)
    mark(table, world)
    if draw_values:
        draw(table, seed=seed, std=config.init_std, world=world)
    return model


def freeze(model: nn.Module, trains: Callable[[Card], bool]) -> None:
    """Leaves what `trains` says to gradients. Everything else keeps its bits: no gradient buffer, no optimizer state, no weight
    decay, no clip, no balancing. To be called before `parallel.wrap` and `optim.build`, which read `cards(model).trained()`.
    """
    for card, parameter in cards(model).trained():
        parameter.requires_grad_(trains(card))


def _provider(config: K3Config, kind: LowPrecision | None, world: World) -> Provider | None:
    if kind is None:
        return None
    if wrong := dict(off_grid(describe(config).values(), kind, world.groups.tp.size())):
        name, (rows, cols) = next(iter(wrong.items()))
        raise ConfigError(
            f"low_precision={kind.value}: {len(wrong)} matrices are no multiples of {kind.grid} on a tensor rank, {name} among "
            f"them with {rows} x {cols}; give other sizes, or None"
        )
    from k3.te import TransformerEngine

    return TransformerEngine(kind)


def cards(model: nn.Module) -> CardTable:
    """The card of every parameter and router bias that this rank holds, bound to its tensor.

    Raises CardError for a parameter without a card, or a card without a parameter.
    """
    whole = unwrap(model)
    tensors: dict[str, Tensor] = dict(whole.named_parameters())
    tensors |= {name: buffer for name, buffer in whole.named_buffers() if name.endswith("balancer.bias")}
    return CardTable({name: card for name, card in describe(whole.k3).items() if whole.holds(name)}, tensors)


def unwrap(model: nn.Module) -> Model:
    """The model inside a wrapper, or the model itself."""
    while not isinstance(model, Model):
        model = model.module  # type: ignore[assignment]
    return model


def balancing(model: nn.Module) -> Balancing:
    """The balancers of this rank's routers, in the model's order; frozen routers stay as they are."""
    whole = unwrap(model)
    routers = [m for m in whole.modules() if isinstance(m, Router)]
    return Balancing([m.balancer for m in routers if m.weight.requires_grad], whole.world)


def clip_targets(model: nn.Module) -> list[ClipTarget]:
    """The trained MLA heads whose logits the weight clip watches. KDA has none: its queries and keys are normalised."""
    out = []
    for name, module in unwrap(model).named_modules():
        query = "q_proj" if isinstance(module, MLA) and module.direct_query else "q_b_proj"
        if isinstance(module, MLA) and module.get_parameter(f"{query}.weight").requires_grad:
            out.append(
                ClipTarget(
                    query=f"{name}.{query}.weight",
                    key_value=f"{name}.kv_b_proj.weight",
                    nope=module.nope,
                    rope=module.rope,
                    value=module.value,
                    max_logits=module.max_logits,
                )
            )
    return out


def residual_weights(model: nn.Module) -> dict[str, Tensor]:
    """Mean reading weight of each source (embedding, finished blocks, running sum) in the last forward pass, by reader."""
    named = unwrap(model).named_modules()
    return {n: m.weights for n, m in named if isinstance(m, ReadBlocks) and m.weights is not None}
