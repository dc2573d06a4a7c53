"""Which modules Transformer Engine builds, in which region each of them runs, and that all else stays as it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import k3
from k3.activations import ActivationConfig, Save
from k3.config import ConfigError, Residual
from k3.low_precision import LowPrecision
from k3.model import Model
from parallel.local import Helper
from tests.k3 import te_standin as te
from tests.k3.low_precision_ranks import batch, built, config, losses_and_gradients

KINDS = (LowPrecision.fp8, LowPrecision.mxfp8)
RECIPES = {
    LowPrecision.mxfp8: te.MXFP8BlockScaling(te.Format.E4M3),
    LowPrecision.fp8: te.Float8BlockScaling(te.Format.E4M3),
}
KDA = {f"attention.{name}_proj": te.Linear for name in "qkvo"}
MLA = {
    **{f"attention.{name}_proj": te.Linear for name in ("q_a", "q_b", "kv_b", "g", "o")},
    "attention.kv_a_proj_with_mqa": te.Linear,
    **{f"attention.{name}": te.RMSNorm for name in ("q_a_layernorm", "kv_a_layernorm")},
    "attention.core_attention": te.DotProductAttention,
}
MOE = {
    **{f"feed_forward.experts.products.{name}": te.GroupedLinear for name in ("gate_up", "down")},
    "feed_forward.experts.products.pad": te.Fp8Padding,
    "feed_forward.experts.products.unpad": te.Fp8Unpadding,
    **{f"feed_forward.shared_experts.{name}_proj": te.Linear for name in ("gate", "up", "down")},
    "post_attention_layernorm": te.RMSNorm,
}
NORM = {"input_layernorm": te.RMSNorm}
# of a dense layer the feed-forward part stays out; so do the embedding, the head, latent projections and norm, router, KDA gates
LAYERS = {"layers.0": KDA | NORM, "layers.1": KDA | MOE | NORM, "layers.2": KDA | MOE | NORM}
LAYERS |= {"layers.3": MLA | MOE | NORM, "mtp.0": MLA | MOE | NORM}
INTENDED = {f"{place}.{name}": kind for place, names in LAYERS.items() for name, kind in names.items()}
QUANTISED = (te.Linear, te.GroupedLinear)


@pytest.fixture
def record() -> Iterator[te.Record]:
    with te.installed() as record:
        yield record


def kind_of(module: torch.nn.Module) -> type:
    """The library's class behind ours."""
    return next(c for c in type(module).__mro__ if c.__module__ == te.__name__)


def names(model: Model) -> dict[int, str]:
    return {id(module): name for name, module in model.named_modules()}


@pytest.mark.parametrize("kind", KINDS)
def test_exactly_the_intended_modules_are_built(record: te.Record, kind: LowPrecision):
    model = built(kind, torch.float32)
    where = names(model)
    assert len(record.built) == len(INTENDED)
    assert {where[id(module)]: kind_of(module) for module in record.built} == INTENDED
    for module in record.built:
        settings, name = record.settings[id(module)], where[id(module)]
        if kind_of(module) is te.Linear:
            assert settings["parallel_mode"] == ("row" if name.endswith(("o_proj", "down_proj")) else None), name
        if kind_of(module) in (te.Fp8Padding, te.Fp8Unpadding):
            assert settings["align_size"] == kind.grid


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_products_run_in_the_recipe_and_nothing_else_does(record: te.Record, kind: LowPrecision, recompute: bool):
    whole = ActivationConfig(layer=Save.recompute, head=Save.recompute) if recompute else None
    model = built(kind, torch.float32, activations=whole, model=config(residual=Residual.sum))
    losses = model(**batch())
    forward = Counter(id(module) for module, _ in record.ran)
    losses.sum().backward()
    where = names(model)
    assert {where[key] for key in forward} == set(INTENDED)  # all of them run, with plain residuals the norms too
    for module, recipe in record.ran:
        assert recipe == (RECIPES[kind] if kind_of(module) in QUANTISED else None), where[id(module)]
    again = Counter(id(module) for module, _ in record.ran)
    repeated = {where[key] for key in again if again[key] > forward[key]}
    # a layer is repeated up to its last saved tensor, inside the backward pass
    assert repeated >= {n for n, kind in INTENDED.items() if kind is te.GroupedLinear} if recompute else not repeated


def test_without_low_precision_nothing_of_it_is_built(record: te.Record):
    losses_and_gradients(built(None, torch.float32))
    assert not record.built and not record.ran


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_of_the_default_modules(record: te.Record, kind: LowPrecision, dtype: torch.dtype, close: float):
    """The stand-in does not quantise: padding, splitting by expert, documents and weights by view must change nothing."""
    (losses, gradients), (wanted, wanted_gradients) = (losses_and_gradients(built(k, dtype)) for k in (kind, None))
    assert torch.linalg.norm(losses - wanted) <= close * torch.linalg.norm(wanted)
    assert gradients.keys() == wanted_gradients.keys()
    for name, gradient in gradients.items():
        wide, other = gradient.double(), wanted_gradients[name].double()
        # a bfloat16 gradient near cancellation differs by its own rounding
        assert torch.linalg.norm(wide - other) <= (close * 4) * torch.linalg.norm(other) + 1e-9, name


def test_parameters_cards_and_state_stay_the_same(record: te.Record):
    ours, plain = built(LowPrecision.mxfp8, torch.bfloat16), built(None, torch.bfloat16)
    for seen in (lambda m: dict(k3.cards(m)), lambda m: [(n, p.shape, p.dtype) for n, p in m.named_parameters()]):
        assert seen(ours) == seen(plain)
    state, wanted = ours.state_dict(), plain.state_dict()
    tensors = {name for name, value in wanted.items() if isinstance(value, torch.Tensor)}
    assert {name for name, value in state.items() if isinstance(value, torch.Tensor)} == tensors
    assert all(torch.equal(state[name], wanted[name]) for name in tensors)  # drawn alike, too
    plain.load_state_dict(state, strict=False)
    ours.load_state_dict(wanted, strict=False)


@pytest.mark.parametrize(
    ("change", "out", "also"),
    [
        ({"latent": False, "latent_norm": False, "moe.shared_experts": 0}, "shared_experts", "post_attention_layernorm"),
        ({"moe.shared_experts": 0}, "post_attention_layernorm", "products.gate_up"),  # only the router and the latents read it
        ({"mla.q_lora_rank": None}, "q_a_proj", "attention.q_proj"),
        ({"mla.output_gate": False}, "layers.3.attention.g_proj", "layers.3.attention.o_proj"),
    ],
)
def test_the_cards_decide(record: te.Record, change: dict[str, Any], out: str, also: str):
    model = config()
    for key, value in change.items():
        part, _, name = key.rpartition(".")
        model = replace(model, **{part or key: replace(getattr(model, part), **{name: value}) if part else value})
    whole = built(LowPrecision.mxfp8, torch.float32, model=model)
    where = [names(whole)[id(module)] for module in record.built]
    assert not [name for name in where if out in name] and [name for name in where if also in name]
    losses_and_gradients(whole)


def test_a_rank_without_tokens_has_gradients(record: te.Record):
    experts = built(LowPrecision.mxfp8, torch.float32).layers["1"].feed_forward.experts
    out = experts(torch.zeros(0, 32), torch.zeros(4, dtype=torch.int64), torch.zeros(0))
    out.sum().backward()
    assert out.shape == (0, 32) and not experts.gate_up.grad.any() and not experts.down.grad.any()
    assert not record.ran  # the library is not asked for products of nothing


def test_samples_of_any_length_are_padded_and_batches_off_the_grid_refused(record: te.Record):
    ours, plain = built(LowPrecision.mxfp8, torch.float64).eval(), built(None, torch.float64).eval()
    with torch.no_grad():
        tokens = batch()["tokens"][:1, :7]
        assert torch.allclose(ours(tokens), plain(tokens), rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="2 rows of 15 tokens are 30 a rank; the low precision takes multiples of 32"):
        ours(**{name: x[:, :15] for name, x in batch().items()})


def test_matrices_off_the_grid_are_refused_by_name(record: te.Record):
    narrow = config(mla=replace(config().mla, q_lora_rank=48))
    with pytest.raises(ConfigError, match=r"low_precision=mxfp8: 4 matrices .* 32 .*layers\.3\.attention\.q_a_proj\.weight"):
        built(LowPrecision.mxfp8, torch.float32, model=narrow)
    built(LowPrecision.fp8, torch.float32, model=narrow)  # on its grid of 16


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 2, "sp": False}, {"cp": 2}], ids=str)
def test_ranks_compute_what_the_default_modules_compute(helper: Helper, sizes: dict[str, Any]):
    target = "tests.k3.low_precision_ranks:both"
    for rank in helper.run_ranks(target, 2, sizes, [LowPrecision.fp8, None], timeout=120):
        (losses, gradients), (wanted, wanted_gradients) = rank
        assert torch.allclose(losses, wanted, rtol=1e-10, atol=0)
        for name, gradient in gradients.items():
            assert torch.allclose(gradient, wanted_gradients[name], rtol=1e-8, atol=1e-12), name
