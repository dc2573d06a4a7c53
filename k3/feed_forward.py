"""Feed-forward parts: the dense gated MLP and Stable LatentMoE (report 2.3), both with SiTU-GLU.

Legend: T tokens of this rank, B rows, d hidden, l latent width (d without latents), E experts on this rank, f width inside
one expert.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from k3.builder import Builder
from k3.config import Activation, K3Config
from k3.context import Context
from k3.router import Router
from kernels.situ import situ_glu, swiglu
from parallel.experts import AllToAll
from parallel.tensor import enter, join_tokens, split_tokens


def activation(config: K3Config) -> Callable[..., Tensor]:
    """(gate, up, scale=None) -> gated activation, the same in dense, shared and routed parts."""
    if config.activation is Activation.swiglu:
        return swiglu
    return partial(situ_glu, beta=config.situ_beta, linear_beta=config.situ_linear_beta)


class GatedMLP(nn.Module):
    """down(act(gate(x), up(x))): [T, B, d] -> [T, B, d] through `size`."""

    def __init__(self, size: int, config: K3Config, build: Builder):
        super().__init__()
        self.world = build.world
        self.gate_proj = build.column("gate_proj", config.hidden_size, size)
        self.up_proj = build.column("up_proj", config.hidden_size, size)
        self.down_proj = build.row("down_proj", size, config.hidden_size)
        self.activation = activation(config)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        x = enter(x, self.world)
        return self.down_proj(self.activation(self.gate_proj(x), self.up_proj(x)))


class Experts(nn.Module):
    """This rank's routed experts, stored together: gate_up [E, 2f, l] (gate rows first), down [E, l, f]."""

    def __init__(self, config: K3Config, build: Builder):
        super().__init__()
        local = config.moe.experts // build.world.groups.ep.size()
        width, size = config.expert_width, config.moe.expert_size
        self.gate_up = nn.Parameter(torch.empty(local, 2 * size, width, dtype=build.megatron.params_dtype))
        self.down = nn.Parameter(torch.empty(local, width, size, dtype=build.megatron.params_dtype))
        self.products = build.grouped("gate_up", local, width, size)
        self.activation = activation(config)

    def forward(self, tokens: Tensor, counts: Tensor, probabilities: Tensor) -> Tensor:
        return self.products(tokens, counts, self.gate_up, self.down, self.activation, probabilities)


class LatentMoE(nn.Module):
    """Shared(x) + W_up RMS(sum_j p_j E_j(W_down x)): [T, B, d] -> [T, B, d].

    Tensor ranks route tokens of their own, with and without sequence parallelism: the routed experts are not cut over them, and
    equal tokens on several ranks would be sent and computed several times. What travels to experts and back is latents.
    """

    def __init__(self, config: K3Config, build: Builder):
        super().__init__()
        self.world = build.world
        d = config.hidden_size
        self.router = Router(config, build.megatron, self.world)
        self.experts = Experts(config, build.at("experts"))
        self.dispatch = AllToAll(build.megatron, config.moe.experts, self.world)
        self.latent, self.normed = config.latent, config.latent_norm
        if config.latent:
            self.routed_expert_down_proj = build.duplicated("routed_expert_down_proj", d, config.moe.latent_size)
            self.routed_expert_up_proj = build.duplicated("routed_expert_up_proj", config.moe.latent_size, d)
        if config.latent_norm:
            self.routed_expert_norm = build.norm("routed_expert_norm", config.expert_width)
        shared, place = config.moe.shared_experts, build.at("shared_experts")
        self.shared_experts = GatedMLP(shared * config.moe.expert_size, config, place) if shared else None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        own = split_tokens(x, self.world)
        flat = own.reshape(-1, own.shape[-1])
        chosen, weights = self.router(flat, context)
        routed = self.dispatch.dispatch(self.routed_expert_down_proj(flat) if self.latent else flat, chosen, weights)
        out = self.dispatch.combine(self.experts(routed.tokens, routed.counts, routed.probabilities))
        if self.normed:
            out = self.routed_expert_norm(out)
        if self.latent:
            out = self.routed_expert_up_proj(out)
        out = join_tokens(out.view(own.shape), self.world)
        return out if self.shared_experts is None else out + self.shared_experts(x)
