"""Bytes that one rank hands to others in a stage's passes, from shapes alone: one function for each module of k3/.

The convention is that of parallel/traffic.py, which counts real collectives: an all-gather of b bytes a rank over n ranks is b
(n - 1), a reduce-scatter to b likewise, an all-reduce 2 b (n - 1) / n. Routing is taken as balanced. What only the first or last
rank of a group does not send is spread over the group. tests/recipes/test_communication.py compares with real steps.

Legend: N tokens of a context rank, n of those between parallel layers, r those a tensor rank routes (`k3.memory.Share`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from k3.activations import ActivationConfig, Save
from k3.config import Balance, K3Config
from k3.flops import travelling
from k3.memory import INDEX, Share


@dataclass(frozen=True)
class Sent:
    """By one collective and its mirror image in the backward pass, of one micro-batch on one rank."""

    axis: str  # "tensor", "context", "expert" or "pipeline"
    forward: int
    backward: int
    last: bool = False  # behind the last tensor that its part saves: a repetition leaves it out
    role: str = ""
    layer: str = ""


def stage(c: K3Config, s: Share, layers: Sequence[range], number: int) -> list[Sent]:
    """All of stage `number`, which has `layers[number]`. Pipeline bytes are those it sends: outputs on, gradients back."""
    out = [] if number else _embedding(c, s)
    for index in layers[number]:
        out += layer(c, s, index)
    if number == len(layers) - 1:
        out += _head(c, s)
        for ahead in range(c.mtp_layers):
            name = f"mtp.{ahead}"
            out += [*_embedding(c, s), *_in(mla(c, s), "attention", name), *_head(c, s)]
            out += _in(latent_moe(c, s) if c.moe.experts else gated_mlp(c, s), "feed_forward", name)
    on, back = travelling(c, s, layers, number), travelling(c, s, layers, number - 1) if number else 0
    return [*out, Sent("pipeline", on, back)] if on or back else out


def layer(c: K3Config, s: Share, index: int) -> list[Sent]:
    """Both halves of decoder layer `index`."""
    name = f"layers.{index}"
    return [
        *_in(mla(c, s) if c.is_mla(index) else kda(c, s), "attention", name),
        *_in(latent_moe(c, s) if c.is_moe(index) else gated_mlp(c, s), "feed_forward", name),
    ]


def _in(sent: Sequence[Sent], role: str, layer: str) -> list[Sent]:
    return [replace(one, role=role, layer=layer) for one in sent]


def enter(s: Share, width: int) -> Iterator[Sent]:
    """Into column-parallel layers (parallel/tensor.py)."""
    if (ranks := s.parallel.tp) > 1:
        part = s.tokens // ranks * width * s.width * (ranks - 1)
        yield Sent("tensor", part, part) if s.gathers else Sent("tensor", 0, 2 * part)


def leave(s: Share, width: int, *, last: bool = False) -> Iterator[Sent]:
    """Out of a row-parallel layer, or of an embedding."""
    if (ranks := s.parallel.tp) > 1:
        part = s.tokens // ranks * width * s.width * (ranks - 1)
        yield Sent("tensor", part, part, last) if s.gathers else Sent("tensor", 2 * part, 0, last)


def kda(c: K3Config, s: Share) -> list[Sent]:
    """In and out; over context ranks the state's map and its gradient, and the convolutions' last inputs."""
    k, ranks = c.kda, s.parallel.cp
    heads = k.heads // s.parallel.tp
    out = [*enter(s, c.hidden_size), *leave(s, c.hidden_size, last=True)]
    if ranks > 1:
        state = s.rows * heads * k.head_dim**2 * s.math * (ranks - 1)
        edge = s.rows * (k.conv_size - 1) * 3 * heads * k.head_dim * s.width * (ranks - 1) // ranks
        out += [Sent("context", 2 * state, state), Sent("context", edge, edge)]
    return out


def mla(c: K3Config, s: Share) -> list[Sent]:
    """In, queries, latents, out; over context ranks the latents of all tokens."""
    a, ranks = c.mla, s.parallel.cp
    compressed = a.kv_lora_rank + a.rope_dim
    out = [*enter(s, compressed), *leave(s, c.hidden_size, last=True)]
    if a.q_lora_rank is None or a.output_gate:
        out += enter(s, c.hidden_size)
    if a.q_lora_rank is not None:
        out += enter(s, a.q_lora_rank)
    if ranks > 1:
        part = s.tokens * compressed * s.width * (ranks - 1)
        out.append(Sent("context", part, part))
    return out


def gated_mlp(c: K3Config, s: Share) -> list[Sent]:
    return [*enter(s, c.hidden_size), *leave(s, c.hidden_size, last=True)]


def latent_moe(c: K3Config, s: Share) -> list[Sent]:
    """Vectors to experts and back with their weights, the counts of all experts, shared experts."""
    k, ranks, tp = c.moe, s.parallel.ep, s.parallel.tp
    out = []
    if ranks > 1:
        away = s.routed * k.top_k * (ranks - 1) // ranks
        vectors, weights = away * c.expert_width * s.width, away * s.math
        counts = k.experts * INDEX * (ranks - 1)
        out += [Sent("expert", vectors + weights + counts, vectors + weights), Sent("expert", vectors, vectors)]
    if tp > 1 and not s.gathers:  # each tensor rank takes tokens of its own, and gives them to the others
        part = s.routed * c.hidden_size * s.width * (tp - 1)
        out += [Sent("tensor", 0, part), Sent("tensor", part, 0)]
    if k.shared_experts:
        out += gated_mlp(c, s)
    if k.balance is Balance.aux:
        ranks = tp * s.parallel.cp * (s.parallel.dp or 1)
        out.append(Sent("all", 2 * k.experts * INDEX * (ranks - 1) // ranks, 0))
    return out


def _embedding(c: K3Config, s: Share) -> list[Sent]:
    return list(leave(s, c.hidden_size))


def _head(c: K3Config, s: Share) -> list[Sent]:
    """In, and three numbers a token for the loss."""
    ranks = s.parallel.tp
    out = list(enter(s, c.hidden_size))
    if ranks > 1:
        out.append(Sent("tensor", 2 * 3 * s.tokens * s.math * (ranks - 1) // ranks, 0))
    return _in(out, "head", "")


def again(sent: Sequence[Sent], policy: ActivationConfig) -> list[Sent]:
    """The collectives whose forward bytes a backward pass sends once more under an activation policy."""
    policy = policy.effective()
    roles = {role for role in ("attention", "feed_forward", "head") if getattr(policy, role) is Save.recompute}
    if policy.layer is Save.recompute:
        whole = [s for s in sent if s.role == "attention" or (s.role == "feed_forward" and not s.last)]
        return whole + [s for s in sent if s.role in roles]
    return [s for s in sent if s.role in roles and not s.last]
