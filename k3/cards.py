"""Fills the card table: one row for each parameter of a K3 model (design principle 1, published names of spec 10.1)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from k3.config import Gate, K3Config, OutputGate, Residual
from parallel.cards import (
    Blocks,
    Card,
    DType,
    Group,
    Optimizer,
    Placement,
    Published,
    Quantise,
    TensorAxis,
    fused,
    heads,
    not_a_matrix,
    whole,
)

ROWS, COLS = Placement(TensorAxis.ROWS), Placement(TensorAxis.COLS)
SUM, SAME = Placement(TensorAxis.REPLICATE_SUM), Placement(TensorAxis.REPLICATE_SAME)
SEQUENCE = Placement(TensorAxis.REPLICATE_SEQUENCE)
EXPERT = Placement(TensorAxis.REPLICATE_SAME, Group.EXPERT)  # experts lie whole on one rank of the expert group


def published_prefix(config: K3Config) -> str:
    """Kimi K3 nests its language model; Kimi Linear (the unbounded gate) does not."""
    return "" if config.kda.gate is Gate.softplus else "language_model."


def describe(config: K3Config) -> dict[str, Card]:
    """Every card of the whole model, by our name, in the model's order. Shapes are global, over all ranks."""
    return {card.name: card for card in _model(config)}


@dataclass(frozen=True)
class _Scope:
    """A module's place: our prefix and the published one."""

    ours: str
    published: str

    def sub(self, ours: str, published: str) -> _Scope:
        return _Scope(f"{self.ours}{ours}.", f"{self.published}{published}.")

    def matrix(
        self, name: str, shape: tuple[int, int], placement: Placement, blocks: Blocks | None = None, role: str = "",
        published: str = "", low: bool = False,
    ) -> Card:  # fmt: skip
        return Card(
            name=f"{self.ours}{name}.weight",
            published=(Published(f"{self.published}{published or name}.weight"),),
            shape=shape,
            blocks=blocks or whole(shape[0]),
            placement=placement,
            optimizer=Optimizer.MUON,
            decay=True,
            role=role,
            low_precision=low,
        )

    def vector(
        self, name: str, shape: tuple[int, ...], placement: Placement, init: str, published: str = "", role: str = "norm",
        dtype: DType = DType.MODEL, decay: bool = False,
    ) -> Card:  # fmt: skip
        return Card(
            name=f"{self.ours}{name}",
            published=(Published(f"{self.published}{published or name}"),),
            shape=shape,
            blocks=not_a_matrix(),
            placement=placement,
            optimizer=Optimizer.ADAMW,
            decay=decay,
            dtype=dtype,
            role=role,
            init=init,
        )

    def norm(self, name: str, size: int, placement: Placement = SEQUENCE, low: bool = False) -> Card:
        return replace(self.vector(f"{name}.weight", (size,), placement, "ones"), low_precision=low)

    def reader(self, name: str, size: int, published: str) -> Iterator[Card]:
        """One Attention Residual mix: its key norm and its zero-initialised query."""
        scope, source = self.sub(name, ""), self.published
        yield replace(scope.vector("norm", (size,), SEQUENCE, "ones"), published=(Published(f"{source}{published}_norm.weight"),))
        query = scope.vector("query", (1, size), SEQUENCE, "zeros", role="residual query")
        yield replace(query, published=(Published(f"{source}{published}_proj.weight"),))


def _model(c: K3Config) -> Iterator[Card]:
    d = c.hidden_size
    outer = published_prefix(c)
    root, head = _Scope("", f"{outer}model."), _Scope("", outer)
    table = Placement(TensorAxis.ROWS)
    read_twice = replace(table, both_ends=c.mtp_layers > 0)
    embedding = root.matrix("embedding", (c.vocab_size, d), read_twice, not_a_matrix(), "embedding", "embed_tokens")
    yield replace(embedding, optimizer=Optimizer.ADAMW)
    for index in range(c.layers):
        yield from _layer(c, index, root.sub(f"layers.{index}", f"layers.{index}"))
    if c.residual is Residual.attnres:
        yield from root.reader("output_residual", d, "output_attn_res")
    yield root.norm("norm", d)
    yield replace(head.matrix("head", (c.vocab_size, d), table, not_a_matrix(), "head", "lm_head"), optimizer=Optimizer.ADAMW)
    for index in range(c.mtp_layers):
        yield from _mtp(c, head.sub(f"mtp.{index}", f"mtp.{index}"))


def _layer(c: K3Config, index: int, scope: _Scope) -> Iterator[Card]:
    d = c.hidden_size
    attnres = c.residual is Residual.attnres
    if attnres:
        yield from scope.reader("attention_residual", d, "self_attention_res")
    yield scope.norm("input_layernorm", d, low=True)
    yield from (_mla if c.is_mla(index) else _kda)(c, scope.sub("attention", "self_attn"))
    if attnres:
        yield from scope.reader("feed_forward_residual", d, "mlp_res")
    yield scope.norm("post_attention_layernorm", d, low=c.is_moe(index) and _reads_norm(c))
    if c.is_moe(index):
        yield from _moe(c, scope.sub("feed_forward", "block_sparse_moe"))
    else:
        yield from _gated_mlp(c, c.dense_size, scope.sub("feed_forward", "mlp"), "dense")


def _mtp(c: K3Config, scope: _Scope) -> Iterator[Card]:
    d = c.hidden_size
    yield scope.norm("enorm", d)
    yield scope.norm("hnorm", d)
    if c.draft:
        yield replace(scope.matrix("draft_proj", (d, (1 + len(c.draft_blocks)) * d), SEQUENCE, role="mtp"), init="last")
    yield scope.matrix("eh_proj", (d, 2 * d), SEQUENCE, role="mtp")
    yield scope.norm("input_layernorm", d, low=True)
    yield from _mla(c, scope.sub("attention", "self_attn"))
    yield scope.norm("post_attention_layernorm", d, low=bool(c.moe.experts) and _reads_norm(c))
    if c.moe.experts:
        yield from _moe(c, scope.sub("feed_forward", "block_sparse_moe"))
    else:
        yield from _gated_mlp(c, c.dense_size, scope.sub("feed_forward", "mlp"), "dense")
    yield scope.norm("norm", d)


def _kda(c: K3Config, scope: _Scope) -> Iterator[Card]:
    d, k = c.hidden_size, c.kda
    width, p = k.head_dim, k.heads * k.head_dim
    for name in ("q_proj", "k_proj", "v_proj"):
        yield scope.matrix(name, (p, d), ROWS, heads((name[0], width)), "attention", low=True)
    # no gate of KDA is computed in low precision: the decay's error grows with every token that a state lives
    for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
        yield scope.vector(f"{name}.weight", (p, k.conv_size), ROWS, "conv", role="convolution", dtype=DType.FP32, decay=True)
    yield scope.matrix("f_a_proj", (width, d), SUM, role="attention")
    yield scope.matrix("f_b_proj", (p, width), ROWS, role="attention")
    yield scope.matrix("b_proj", (k.heads, d), ROWS, role="attention")
    yield scope.vector("A_log", (k.heads,), ROWS, "zeros", role="decay", dtype=DType.FP32)
    yield scope.vector("dt_bias", (p,), ROWS, "dt_bias", role="decay", dtype=DType.FP32)
    if k.output_gate is OutputGate.full:
        yield scope.matrix("g_proj", (p, d), ROWS, role="attention")
    elif k.output_gate is OutputGate.low_rank:
        yield scope.matrix("g_a_proj", (width, d), SUM, role="attention")
        yield scope.matrix("g_b_proj", (p, width), ROWS, role="attention")
    # each tensor rank norms its own heads with the one shared weight
    yield scope.vector("o_norm.weight", (width,), SUM, "ones", dtype=DType.FP32)
    yield scope.matrix("o_proj", (d, p), COLS, role="attention", low=True)


def _mla(c: K3Config, scope: _Scope) -> Iterator[Card]:
    d, m = c.hidden_size, c.mla
    key = m.nope_dim + m.rope_dim
    query = heads(("query", key))
    if m.q_lora_rank is None:
        yield scope.matrix("q_proj", (m.heads * key, d), ROWS, query, "attention", low=True)
    else:
        yield scope.matrix("q_a_proj", (m.q_lora_rank, d), SEQUENCE, role="attention", low=True)
        yield scope.norm("q_a_layernorm", m.q_lora_rank, low=True)
        yield scope.matrix("q_b_proj", (m.heads * key, m.q_lora_rank), ROWS, query, "attention", low=True)
    yield scope.matrix("kv_a_proj_with_mqa", (m.kv_lora_rank + m.rope_dim, d), SEQUENCE, role="attention", low=True)
    yield scope.norm("kv_a_layernorm", m.kv_lora_rank, low=True)
    key_value = heads(("key", m.nope_dim), ("value", m.v_dim))
    rows = m.heads * (m.nope_dim + m.v_dim)
    yield scope.matrix("kv_b_proj", (rows, m.kv_lora_rank), ROWS, key_value, "attention", low=True)
    if m.output_gate:
        yield scope.matrix("g_proj", (m.heads * m.v_dim, d), ROWS, role="attention", low=True)
    yield scope.matrix("o_proj", (d, m.heads * m.v_dim), COLS, role="attention", low=True)


def _gated_mlp(c: K3Config, size: int, scope: _Scope, role: str) -> Iterator[Card]:
    low = role == "shared"  # dense layers are the first ones: their error would pass through all others
    for name in ("gate_proj", "up_proj"):
        yield scope.matrix(name, (size, c.hidden_size), ROWS, role=role, low=low)
    yield scope.matrix("down_proj", (c.hidden_size, size), COLS, role=role, low=low)


def _reads_norm(c: K3Config) -> bool:
    """Whether a low-precision matrix reads the norm before a mixture of experts: latent experts read a projection of it."""
    return c.moe.shared_experts > 0 or not c.latent


def _moe(c: K3Config, scope: _Scope) -> Iterator[Card]:
    d, e = c.hidden_size, c.moe
    width, f = c.expert_width, e.expert_size
    yield scope.matrix("router", (e.experts, d), SUM, role="router", published="gate")
    bias = scope.vector("router.balancer.bias", (e.experts,), SAME, "zeros", "gate.e_score_correction_bias", "router bias")
    yield replace(bias, optimizer=Optimizer.BALANCE, dtype=DType.FP32)
    gate, up, down = (f"{scope.published}experts.{{expert}}.{w}.weight" for w in ("w1", "w3", "w2"))
    expert = Card(
        name=f"{scope.ours}experts.gate_up",
        published=(Published(gate, (0, f)), Published(up, (f, 2 * f))),
        shape=(e.experts, 2 * f, width),
        blocks=fused(("gate", f), ("up", f), per_expert=True),
        placement=EXPERT,
        optimizer=Optimizer.MUON,
        decay=True,
        quantise=Quantise.MXFP4,
        role="expert",
        low_precision=True,
    )
    yield expert
    yield replace(
        expert,
        name=f"{scope.ours}experts.down",
        published=(Published(down),),
        shape=(e.experts, width, f),
        blocks=whole(width, per_expert=True),
    )
    if c.latent:
        yield scope.matrix("routed_expert_down_proj", (e.latent_size, d), SUM, role="latent")
        yield scope.matrix("routed_expert_up_proj", (d, e.latent_size), SUM, role="latent")
    if c.latent_norm:
        yield scope.norm("routed_expert_norm", width, SUM)
    if e.shared_experts:
        yield from _gated_mlp(c, e.shared_experts * f, scope.sub("shared_experts", "shared_experts"), "shared")


class _CallableModule(ModuleType):
    """`k3.cards(model)` is the public function, and importing this file binds the module to the same name: both must work."""

    def __call__(self, model: Any) -> Any:
        from k3.construct import cards

        return cards(model)


sys.modules[__name__].__class__ = _CallableModule
