"""What must hold of the whole model whatever its values: causality, packing, the pre-norm start, determinism, finiteness."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

import k3
from k3.config import Activation, Attention, Balance, K3Config, MoEConfig, Residual
from k3.residual import ReadBlocks
from tests.k3.randomise import randomise


def tokens(batch: int, length: int, vocabulary: int = 256, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_later_tokens_never_change_earlier_logits(dtype: torch.dtype) -> None:
    model = randomise(k3.build(k3.preset("tiny"), dtype=dtype)).eval()
    x = tokens(1, 96)
    with torch.no_grad():
        before = model(x)
        for cut in (1, 40, 70, 95):
            changed = x.clone()
            changed[:, cut:] = (changed[:, cut:] + 7) % 256
            after = model(changed)
            assert torch.equal(before[:, :cut], after[:, :cut]), cut
            assert not torch.equal(before[:, cut:], after[:, cut:])


def test_packed_documents_equal_the_documents_alone() -> None:
    """Values and gradients, MTP included: one row of five documents against five rows."""
    model = randomise(k3.build(k3.preset("tiny"), dtype=torch.float64)).eval()
    bounds = [0, 1, 30, 31, 77, 120]
    row = tokens(1, 120)
    starts = torch.zeros(1, 120, dtype=torch.bool)
    starts[0, bounds[:-1]] = True
    labels = torch.cat([row[:, 1:], row[:, :1]], 1)
    mask = torch.zeros(2, 1, 120, dtype=torch.bool)
    for first, last in itertools.pairwise(bounds):
        mask[0, 0, first : last - 1] = True
        mask[1, 0, first : max(first, last - 2)] = True
    model(row, starts, labels=labels, loss_mask=mask).sum().backward()
    packed = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        together = model(row, starts)
    model.zero_grad()
    for first, last in itertools.pairwise(bounds):
        part = slice(first, last)
        model(row[:, part], labels=labels[:, part], loss_mask=mask[:, :, part]).sum().backward()
        with torch.no_grad():
            torch.testing.assert_close(model(row[:, part]), together[:, part], rtol=0, atol=1e-11)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, packed[name], rtol=1e-8, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


def test_zero_queries_give_the_pre_norm_network() -> None:
    """Mixing uniformly is the running sum over the number of sources; the norm that follows removes the factor (report 2.2)."""
    config = replace(k3.preset("tiny"), norm_eps=1e-12)
    model = k3.build(config, dtype=torch.float64).eval()
    plain = k3.build(replace(config, residual=Residual.sum), dtype=torch.float64).eval()
    values = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            assert torch.equal(parameter, values[name])
        x = tokens(2, 50)
        torch.testing.assert_close(model(x), plain(x), rtol=0, atol=1e-9)
        for reader in model.modules():
            if isinstance(reader, ReadBlocks):
                reader.query.normal_(std=0.5)
        assert not torch.allclose(model(x), plain(x), atol=1e-3)


def test_one_seed_gives_one_model_even_in_dirty_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    first = k3.build(k3.preset("tiny"), seed=3)
    empty = torch.empty

    def dirty(*args, **kwargs):  # fresh memory that was used before holds anything, NaN included
        out = empty(*args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", dirty)
    second = k3.build(k3.preset("tiny"), seed=3)
    monkeypatch.undo()
    other = dict(second.named_parameters()) | dict(second.named_buffers())
    for name, value in (dict(first.named_parameters()) | dict(first.named_buffers())).items():
        assert torch.equal(value, other[name]), name
        assert value.isfinite().all() or name.endswith("max_logits"), name
    x = tokens(2, 40)
    losses = second(x, labels=x.roll(-1, 1))
    losses.sum().backward()
    assert losses.isfinite().all()
    assert all(p.grad.isfinite().all() for p in second.parameters() if p.grad is not None)
    third = k3.build(k3.preset("tiny"), seed=4)
    assert not torch.equal(first.embedding.weight, third.embedding.weight)


def test_first_values_follow_the_spec() -> None:
    model = k3.build(k3.preset("tiny"))
    table = k3.cards(model)
    for name, card in table.items():
        value = table.tensor(name).detach()
        if card.role in ("residual query", "router bias") or name.endswith("A_log"):
            assert not value.any(), name
        elif card.role == "norm":
            assert (value == 1).all(), name
        elif name.endswith("dt_bias"):  # softplus gives back a time step in [1e-3, 1e-1]
            dt = torch.nn.functional.softplus(value)
            assert dt.min() > 0.99e-3 and dt.max() < 1.01e-1 and dt.std() > 1e-3
        elif card.init == "normal":
            assert value.std().item() == pytest.approx(model.k3.init_std, rel=0.2), name


@pytest.mark.parametrize("name", ["tiny", "nano"])
def test_initial_loss_is_near_ln_vocabulary(name: str) -> None:
    config = k3.preset(name)
    model = k3.build(config)
    x = tokens(4, 64, config.vocab_size)
    losses = model(x, labels=tokens(4, 64, config.vocab_size, seed=2))
    assert losses[0].mean().item() == pytest.approx(math.log(config.vocab_size), abs=0.15)
    counted = losses[1][:, :-1].mean().item()
    assert counted == pytest.approx(math.log(config.vocab_size), abs=0.15)


SWITCHES = {
    "residual=sum": {"residual": Residual.sum},
    "activation=swiglu": {"activation": Activation.swiglu},
    "attention=mla": {"attention": Attention.mla},
    "latent=false": {"latent": False},
    "latent_norm=false": {"latent_norm": False},
    "mtp_layers=0": {"mtp_layers": 0},
    "mtp_layers=2": {"mtp_layers": 2},
    "dense": {"moe": MoEConfig(experts=0), "dense_layers": 9},
    "no shared experts": {"moe": replace(k3.preset("tiny").moe, shared_experts=0)},
    "balance=aux": {"moe": replace(k3.preset("tiny").moe, balance=Balance.aux)},
    "balance=bias": {"moe": replace(k3.preset("tiny").moe, balance=Balance.bias)},
    "balance=none": {"moe": replace(k3.preset("tiny").moe, balance=Balance.none)},
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_every_switch_trains(switch: str) -> None:
    """A small step against the gradient lowers the loss, and every parameter but the unused mix has a gradient."""
    config: K3Config = replace(k3.preset("tiny"), **SWITCHES[switch])
    model = randomise(k3.build(config, dtype=torch.float64))
    x = tokens(2, 48)
    labels = x.roll(-1, 1)
    before = model(x, labels=labels).sum()
    before.backward()
    squares = 0.0
    for name, parameter in model.named_parameters():
        if name.startswith("layers.0.attention_residual"):
            assert not parameter.grad.any()  # nothing to mix there
        else:
            assert parameter.grad is not None and parameter.grad.any(), name
            squares += parameter.grad.square().sum().item()
    size = 1e-7 * before.item() / squares  # first order: this fraction off the loss
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= size * parameter.grad
    drop = 1 - model(x, labels=labels).sum().item() / before.item()
    assert drop == pytest.approx(1e-7, rel=0.05)


def test_linear_48b_shape_trains_at_toy_width() -> None:
    """Kimi Linear's own options: softplus gate, low-rank output gate, direct queries, no output gate on MLA."""
    c = k3.preset("linear_48b")
    c = replace(
        c, vocab_size=256, hidden_size=64, layers=5, dense_size=96, init_std=0.02, kda=replace(c.kda, heads=2, head_dim=16),
        mla=replace(c.mla, heads=2, kv_lora_rank=16, nope_dim=16, rope_dim=8, v_dim=16),
        moe=replace(c.moe, experts=8, top_k=2, expert_size=32, latent_size=64),
    )  # fmt: skip
    model = k3.build(c, dtype=torch.float64)
    x = tokens(2, 40)
    model(x, labels=x.roll(-1, 1)).mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_wrong_inputs_are_named() -> None:
    model = k3.build(k3.preset("tiny"))
    x = tokens(1, 8)
    with pytest.raises(ValueError, match=r"tokens holds .*vocabulary is 0\.\.255"):
        model(x + 250)
    with pytest.raises(ValueError, match="document_starts"):
        model(x, document_starts=torch.zeros(1, 7, dtype=torch.bool))
    for shape in ((3, 1, 8), (2, 1, 7)):
        with pytest.raises(ValueError, match=r"loss_mask has shape \(\d, 1, \d\)"):
            model(x, labels=x, loss_mask=torch.ones(shape, dtype=torch.bool))


def test_a_mask_of_one_row_leaves_the_mtp_layers_out() -> None:
    """Their losses, and their gradients, which are zero and not missing."""
    model = randomise(k3.build(k3.preset("tiny"))).train()
    x = tokens(2, 8)
    whole = model(x, labels=x)
    alone = model(x, labels=x, loss_mask=torch.ones(1, 2, 8, dtype=torch.bool))
    assert alone.shape == (1, 2, 8) and torch.equal(alone[0, :, :-1], whole[0, :, :-1])
    alone.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.mtp.parameters())


def test_generation_is_greedy_seeded_and_stops() -> None:
    model = randomise(k3.build(k3.preset("tiny")))
    prompt = tokens(1, 5)
    greedy = k3.generate(model, prompt, 6, temperature=0)
    assert greedy.shape == (1, 11) and torch.equal(greedy[:, :5], prompt)
    with torch.no_grad():
        assert torch.equal(model.eval()(greedy[:, :-1])[0, -1].argmax(), greedy[0, -1])
    assert torch.equal(k3.generate(model, prompt, 6, seed=1), k3.generate(model, prompt, 6, seed=1))
    assert not torch.equal(k3.generate(model, prompt, 12, seed=1), k3.generate(model, prompt, 12, seed=2))
    assert torch.equal(k3.generate(model, prompt, 6, top_k=1, seed=5), greedy)
    assert k3.generate(model, prompt, 6, temperature=0, stop=int(greedy[0, 5])).shape == (1, 6)
