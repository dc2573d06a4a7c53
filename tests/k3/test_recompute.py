"""What is saved for the backward pass: fewer bytes under every policy, the same numbers, and counts that are taken once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import k3
from k3.activations import ActivationConfig, Save, full, keep, selective
from k3.config import Balance, Residual
from k3.context import Context
from k3.residual import Rows
from tests.k3.randomise import randomise

RECOMPUTE = Save.recompute
POLICIES = {
    "layer": ActivationConfig(layer=RECOMPUTE),
    "attention": ActivationConfig(attention=RECOMPUTE),
    "feed_forward": ActivationConfig(feed_forward=RECOMPUTE),
    "both halves": ActivationConfig(attention=RECOMPUTE, feed_forward=RECOMPUTE),
    "head": ActivationConfig(head=RECOMPUTE),
    "full": full(),
    "selective": selective(),
}
INSIDE = [name for name in POLICIES if name != "head"]  # those that change what a layer saves
LAYERS = {"KDA": "1", "MLA": "3"}  # of the tiny model, both with MoE, neither begins a block
T, B = 24, 2


def saved(run: Callable[[], Any], model: nn.Module) -> dict[int, int]:
    """Bytes of every storage that `run` saves for its backward pass, parameters excepted; by the storage's address."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, int] = {}
    alive = []  # else an address could be used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            alive.append(tensor)
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        alive.append(run())
    return storages


@dataclass
class Layers:
    """What a layer saves beside the rows of the bank, and those rows: they exist once however many layers read them."""

    own: int
    bank: int


def layer_bytes(name: str, bank: int, residual: Residual, activations: ActivationConfig) -> Layers:
    """Of one decoder layer. Its running prefix is its own in both residual schemes: each layer makes a new one."""
    config = replace(k3.preset("tiny"), residual=residual)
    model = randomise(k3.build(config, activations=activations)).train()
    leaves = [torch.randn(T, B, 64).requires_grad_() for _ in range(1 + bank)]
    starts = torch.zeros(B, T, dtype=torch.bool)
    starts[:, 0] = starts[:, T // 2] = True
    rows = Rows(leaves[0], tuple(leaves[1:]) if residual is Residual.attnres else ())
    storages = saved(lambda: model.layers[name](rows, Context(starts, T)), model)
    shared = {row.untyped_storage().data_ptr() for row in rows.bank}
    assert shared <= set(storages)
    return Layers(sum(n for at, n in storages.items() if at not in shared), sum(storages[at] for at in shared))


@pytest.mark.parametrize("bank", [1, 2, 3])
@pytest.mark.parametrize("name", LAYERS)
def test_an_attention_residual_layer_saves_what_a_plain_one_saves_and_three_numbers_a_token_and_row(name: str, bank: int) -> None:
    plain = layer_bytes(LAYERS[name], bank, Residual.sum, keep())
    mixed = layer_bytes(LAYERS[name], bank, Residual.attnres, keep())
    assert mixed.own - plain.own == 2 * 3 * (bank + 1) * T * B * 4  # two reads
    assert (mixed.bank, plain.bank) == (bank * T * B * 64 * 4, 0)


@pytest.mark.parametrize("policy", INSIDE)
@pytest.mark.parametrize("bank", [1, 3])
@pytest.mark.parametrize("name", LAYERS)
def test_policies_save_fewer_bytes_of_a_layer_in_both_residual_schemes(name: str, bank: int, policy: str) -> None:
    tokens, row = T * B * 4, T * B * 64 * 4
    halves = {"layer": 0, "full": 0, "both halves": 0}.get(policy, 1)  # that are kept, and read once each
    kept, less = (layer_bytes(LAYERS[name], bank, Residual.attnres, p) for p in (keep(), POLICIES[policy]))
    plain = layer_bytes(LAYERS[name], bank, Residual.sum, POLICIES[policy])
    assert less.own - plain.own == halves * 3 * (bank + 1) * tokens
    assert less.bank == kept.bank == bank * row
    assert less.own < 0.7 * kept.own
    if policy in ("layer", "full"):
        assert less.own == row  # the running prefix alone
    if policy == "both halves":
        assert less.own == 2 * row  # the running prefix before and after the attention


def batch() -> dict[str, Tensor]:
    """Three documents a row, the last tokens padding."""
    tokens = torch.randint(0, 256, (B, T), generator=torch.Generator().manual_seed(3))
    starts = torch.zeros(B, T, dtype=torch.bool)
    starts[:, [0, 7, 15]] = True
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[:, -2:] = True
    return {"tokens": tokens, "document_starts": starts, "labels": tokens.roll(-1, 1), "padding": padding}


@dataclass
class Seen:
    losses: list[Tensor]
    gradients: dict[str, Tensor]
    counts: list[Tensor]
    max_logits: list[Tensor]
    read: dict[str, Tensor]


@cache
def trained(policy: str, dtype: torch.dtype, balance: Balance = Balance.quantile) -> Seen:
    """Two micro-batches of the whole tiny model, MTP included."""
    config = k3.preset("tiny")
    config = replace(config, moe=replace(config.moe, balance=balance, aux_weight=0.1))
    model = randomise(k3.build(config, dtype=dtype, activations=POLICIES.get(policy, keep()))).train()
    losses = []
    for share in (0.25, 0.75):
        losses.append(model(**batch(), share=share))
        (losses[-1].sum() * share).backward()
    counts = [t for b in k3.balancing(model) for t in (b.counting, getattr(b, "histogram", b.bias))]
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    max_logits = [t.max_logits for t in k3.clip_targets(model)]
    return Seen([x.detach() for x in losses], gradients, counts, max_logits, k3.residual_weights(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("policy", POLICIES)
def test_policies_change_no_bit(policy: str, dtype: torch.dtype) -> None:
    want, got = trained("keep", dtype), trained(policy, dtype)
    assert all(torch.equal(a, b) for a, b in zip(got.losses, want.losses, strict=True))
    assert len(got.gradients) > 150 and got.gradients.keys() == want.gradients.keys()
    assert not [name for name, grad in want.gradients.items() if not torch.equal(got.gradients[name], grad)]
    assert got.read.keys() == want.read.keys()
    assert all(torch.equal(got.read[name], weights) for name, weights in want.read.items())


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_count_once(policy: str) -> None:
    want, got = trained("keep", torch.float64), trained(policy, torch.float64)
    assert all(int(loads.sum()) == 2 * B * (T - 2) * 2 for loads in got.counts[::2])  # passes, tokens, top-2
    assert all(torch.equal(a, b) for a, b in zip(got.counts, want.counts, strict=True))
    assert got.max_logits and all(torch.equal(a, b) for a, b in zip(got.max_logits, want.max_logits, strict=True))


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_an_auxiliary_loss_is_counted_once(policy: str) -> None:
    want, got = (trained(name, torch.float64, Balance.aux) for name in ("keep", policy))
    without = trained("keep", torch.float64, Balance.none)
    router = "layers.1.feed_forward.router.weight"
    assert not torch.equal(want.gradients[router], without.gradients[router])
    assert all(torch.equal(got.gradients[name], grad) for name, grad in want.gradients.items())


def calls(activations: ActivationConfig, *, gradients: bool) -> dict[str, int]:
    """How often each part of the third decoder layer, and the head, began in a forward and, with gradients, a backward pass."""
    model = k3.build(k3.preset("tiny"), activations=activations).train()
    seen: dict[str, int] = {}
    for name in ("layers.2.attention", "layers.2.feed_forward", "head"):
        model.get_submodule(name).register_forward_pre_hook(lambda *_, n=name: seen.update({n: seen.get(n, 0) + 1}))
    with torch.set_grad_enabled(gradients):
        losses = model(**batch())
    if gradients:
        losses.sum().backward()
    return {name.rsplit(".", 1)[-1]: count for name, count in seen.items()}


@pytest.mark.parametrize(
    "policy, attention, feed_forward, head",
    [("layer", 2, 2, 2), ("attention", 2, 1, 2), ("feed_forward", 1, 2, 2), ("head", 1, 1, 4), ("full", 2, 2, 4)],
)
def test_what_is_computed_again(policy: str, attention: int, feed_forward: int, head: int) -> None:
    """The head runs for the next token and for the MTP layer."""
    expected = {"attention": attention, "feed_forward": feed_forward, "head": head}
    assert calls(POLICIES[policy], gradients=True) == expected
    assert calls(POLICIES[policy], gradients=False) == {"attention": 1, "feed_forward": 1, "head": 2}


def test_a_recomputed_layer_recomputes_its_halves_once() -> None:
    everything = ActivationConfig(*[RECOMPUTE] * 4)
    assert calls(everything, gradients=True) == {"attention": 2, "feed_forward": 2, "head": 4}


def test_a_recomputed_head_keeps_no_logits() -> None:
    model = {name: k3.build(k3.preset("tiny"), activations=p).train() for name, p in {"keep": keep(), **POLICIES}.items()}
    own = {name: sum(saved(lambda m=m: m(**batch()), m).values()) for name, m in model.items()}
    logits = T * B * 256 * 4
    assert own["keep"] - own["head"] >= 2 * logits and own["layer"] - own["full"] >= 2 * logits
    assert all(own[name] < own["keep"] for name in POLICIES)


def test_nothing_is_random() -> None:
    """Recomputation does not wind the generator back."""
    model = k3.build(k3.preset("tiny")).train()
    before = torch.get_rng_state()
    model(**batch()).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
