"""qat=mxfp4: what the routed experts compute with, that all else stays, and that the exported weights are those."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import k3
import optim
import parallel
from k3 import hf
from k3 import quantised as quantised_module
from k3.activations import ActivationConfig, Save
from k3.config import ConfigError
from k3.context import Context
from k3.low_precision import LowPrecision
from k3.model import Model
from k3.qat import BLOCK, Qat, QatConfig, Rule
from k3.quantised import QuantisedProducts
from kernels import mx
from kernels.experts import grouped_mlp
from kernels.situ import situ_glu
from optim.config import OptimConfig
from recipes.proof.randomise import randomise
from tests.k3 import te_standin
from tests.k3.low_precision_ranks import batch, config, losses_and_gradients

ON = QatConfig(Qat.mxfp4)
FLOOR = QatConfig(Qat.mxfp4, Rule.floor)
HALF = ActivationConfig(feed_forward=Save.recompute)


def built(qat: QatConfig | None, dtype: torch.dtype = torch.float32, activations: ActivationConfig | None = None) -> Model:
    out = k3.build(config(), dtype=dtype, qat=qat, activations=activations)
    randomise(out, 0)
    return out.train()


def outputs(model: nn.Module, run: Any) -> dict[str, list[Tensor]]:
    """Every tensor that every module gave while `run` ran."""
    seen: dict[str, list[Tensor]] = {}
    hooks = []
    for name, module in model.named_modules():

        def hook(module: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
            parts = output if isinstance(output, tuple) else (output,)
            seen.setdefault(name, []).extend(x.detach().clone() for x in parts if isinstance(x, Tensor))

        hooks.append(module.register_forward_hook(hook))
    run()
    for handle in hooks:
        handle.remove()
    return seen


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other))


@contextmanager
def counted() -> Iterator[list[tuple[int, ...]]]:
    """The shapes of the weights that were rounded."""
    shapes: list[tuple[int, ...]] = []
    real = quantised_module.round_trip

    def counting(x: Tensor, *args: Any) -> Tensor:
        shapes.append(tuple(x.shape))
        return real(x, *args)

    quantised_module.round_trip = counting
    try:
        yield shapes
    finally:
        quantised_module.round_trip = real


def test_the_block_is_the_kernels() -> None:
    assert BLOCK == mx.BLOCK and {rule.value for rule in Rule} == set(mx.RULES)


# what the experts compute


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("counts", [[0, 1, 31, 33, 44], [0, 0, 0, 0, 0], [44, 0, 0, 0, 1], [1, 1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_products_of_any_number_of_tokens(dtype: torch.dtype, counts: list[int], rule: Rule) -> None:
    """Against one expert after another in plain autograd, with x + (rounded(x) - x).detach() in float64."""
    draw = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)
    n, width, inner = sum(counts), 64, 32
    given = [normal(n, width), normal(5, 2 * inner, width), normal(5, width, inner), normal(n).sigmoid()]
    x, gate_up, down, probs = (t.requires_grad_() for t in given)
    products = QuantisedProducts(grouped_mlp, rule, rounds_inputs=False)
    got = products(x, torch.tensor(counts), gate_up, down, situ_glu, probs)
    up = normal(n, width)
    gradients = torch.autograd.grad(got, (x, gate_up, down, probs), up, allow_unused=n == 0)

    def rounded(t: Tensor, format: str) -> Tensor:
        codes, scales = mx.quantise(t, format, rule.value)
        return t + (mx.dequantise(codes, scales, format, t.dtype) - t).detach()

    pieces = []
    for e, (part, p) in enumerate(zip(x.split(counts), probs.split(counts))):
        gate, high = (rounded(part, "mxfp8") @ rounded(gate_up, "mxfp4")[e].t()).chunk(2, -1)
        pieces.append(rounded(situ_glu(gate, high, scale=p), "mxfp8") @ rounded(down, "mxfp4")[e].t())
    want = torch.cat(pieces)
    wanted = torch.autograd.grad(want, (x, gate_up, down, probs), up, allow_unused=n == 0)
    assert got.shape == (n, width)
    if dtype == torch.float64:  # in float32 a product's rounding may move what enters the next one to another code
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        for a, b in zip(gradients, wanted):
            if n:
                torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    elif n:
        assert torch.linalg.norm(got - want) <= 1e-2 * torch.linalg.norm(want)
    assert n or (not gradients[1].any() and not gradients[2].any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_reach_all_masters(dtype: torch.dtype) -> None:
    plain, quantised = (losses_and_gradients(built(qat, dtype)) for qat in (None, ON))
    assert not torch.equal(plain[0], quantised[0])
    assert quantised[1].keys() == plain[1].keys()
    for name, gradient in quantised[1].items():
        assert torch.isfinite(gradient).all() and gradient.any() == plain[1][name].any(), name
        if ".experts." in name:
            assert gradient.flatten(1).any(1).equal(plain[1][name].flatten(1).any(1)), f"{name}: an expert has none"


def test_experts_of_mtp_layers_are_quantised_as_the_cards_say() -> None:
    model = built(ON)
    places = {name.removesuffix(".products") for name, m in model.named_modules() if isinstance(m, QuantisedProducts)}
    assert places == {card.name.rsplit(".", 1)[0] for card in k3.cards(model).values() if card.quantise}
    assert "mtp.0.feed_forward.experts" in places


# what stays


def test_off_is_the_model_without_it() -> None:
    (plain, off), runs = (built(None), built(QatConfig(rule=Rule.floor))), []
    for model in (plain, off):
        runs.append(outputs(model, lambda m=model: losses_and_gradients(m)))
    assert runs[0].keys() == runs[1].keys() and len(runs[0]) > 100
    for name, tensors in runs[0].items():
        assert same(tensors, runs[1][name]), name
    for (name, one), other in zip(plain.named_parameters(), off.parameters()):
        assert (one.grad is None and other.grad is None) or torch.equal(one.grad, other.grad), name


def test_on_changes_the_routed_experts_and_what_reads_them() -> None:
    """Given the same input, all other modules of a mixture of experts give the same, bit for bit."""
    plain, quantised = built(None), built(ON)
    x = torch.randn(16, 2, 64, generator=torch.Generator().manual_seed(1))
    seen = []
    for model in (plain, quantised):
        moe = model.layers["1"].feed_forward
        context = Context(torch.ones(2, 16, dtype=torch.bool), 16)
        seen.append(outputs(moe, lambda moe=moe, context=context: moe(x, context)))
    changed = {name for name in seen[0] if not same(seen[0][name], seen[1][name])}
    assert changed == {"", "experts", "routed_expert_norm", "routed_expert_up_proj"}
    assert {"router", "shared_experts.gate_proj", "shared_experts.down_proj", "routed_expert_down_proj"} <= set(seen[0])
    assert not any(parameter.numel() for parameter in quantised.layers["1"].feed_forward.experts.products.parameters())
    assert plain.state_dict().keys() == quantised.state_dict().keys()


# rounded once a step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_recomputation_and_keeping_rounded_weights_change_nothing(dtype: torch.dtype) -> None:
    want = losses_and_gradients(built(ON, dtype))
    for activations in (None, HALF, ActivationConfig(layer=Save.recompute)):
        for keeps in (False, True):
            model = built(ON, dtype, activations)
            if keeps:
                with model.fixed_weights():
                    got = losses_and_gradients(model)
            else:
                got = losses_and_gradients(model)
            assert torch.equal(got[0], want[0]) and got[1].keys() == want[1].keys()
            for name, gradient in got[1].items():
                assert torch.equal(gradient, want[1][name]), name


def trained(keeps: bool, micro_batches: int = 2, steps: int = 3, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], int]:
    """Parameters after each step of the real optimizer on megatron-core's buffers, and how many weights were rounded."""
    model = built(ON, dtype, HALF)
    if not keeps:
        model.fixed_weights = nullcontext  # type: ignore[method-assign]
    cards = k3.cards(model)
    wrapped = parallel.wrap(model, cards, model.world)
    optimizer = optim.build(OptimConfig(lr=1e-2), cards, shards=wrapped.shards, steps=steps, balancing=k3.balancing(model))
    rows = {name: x.repeat(2, 1) for name, x in batch().items()}
    parts = [dict(zip(rows, part)) for part in zip(*(x.chunk(micro_batches) for x in rows.values()))]
    seen = []
    with counted() as shapes:
        for _ in range(steps):
            wrapped.zero_grad()
            losses = parallel.run_step(wrapped, parts, lambda stage, part: stage(**part), lambda _, out: (out.sum() / 128, None))
            assert len(losses) == micro_batches
            optimizer.step(finite=True, loss=1.0)
            seen.append(torch.cat([p.detach().double().flatten() for p in model.parameters()]))
        assert not any(m.kept for m in model.modules() if isinstance(m, QuantisedProducts)), "the optimizer has its memory back"
    return seen, len(shapes)


def test_weights_are_rounded_once_a_step_and_anew_after_it() -> None:
    once, rounded = trained(keeps=True)
    each, always = trained(keeps=False)
    layers = 4  # mixtures of experts, that of the MTP layer included; two weights each, three steps
    assert rounded == 3 * 2 * layers and always == 3 * 2 * layers * 2 * 2  # micro-batches, and once more in recomputation
    assert not torch.equal(once[0], once[1])
    for a, b in zip(once, each):
        assert torch.equal(a, b)


def test_a_change_through_the_parameter_is_seen_while_weights_are_kept() -> None:
    model, tokens = built(ON).eval(), batch()["tokens"]
    with torch.no_grad(), model.fixed_weights(), counted() as shapes:
        before = model(tokens)
        assert torch.equal(model(tokens), before) and len(shapes) == 6  # without labels MTP does not run
        with model.fixed_weights():
            model(tokens)
        model(tokens)
        assert len(shapes) == 6, "an inner context ends nothing"
        model.layers["1"].feed_forward.experts.down.mul_(-1)
        assert not torch.equal(model(tokens), before) and len(shapes) == 7
    with torch.no_grad(), counted() as shapes:
        model(tokens)
        assert len(shapes) == 6


# what is exported


@pytest.mark.parametrize("qat", [ON, FLOOR], ids=lambda q: q.rule.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_exported_weights_are_those_computed_with(qat: QatConfig, dtype: torch.dtype, tmp_path: Path) -> None:
    model, sample = built(qat, dtype).eval(), batch()
    hf.save(model, tmp_path / "a", quantise="mxfp4")
    with torch.no_grad():
        want = model(**sample)
        again = hf.load(tmp_path / "a", dtype=dtype, qat=qat).eval()
        assert torch.equal(again(**sample), want)
        # without qat the weights are the same, and what enters the products is not rounded
        plain, bare = hf.load(tmp_path / "a", dtype=dtype).eval(), built(None, dtype).eval()
        own = dict(model.named_parameters())
        for name, card in k3.cards(plain).items():
            rounded = mx.round_trip(own[name].detach(), "mxfp4", qat.rule.value) if card.quantise else None
            if rounded is not None:
                assert torch.equal(dict(plain.named_parameters())[name], rounded), name
                dict(bare.named_parameters())[name].copy_(rounded)
        assert torch.equal(plain(**sample), bare(**sample)) and not torch.equal(plain(**sample), want)
    hf.save(again, tmp_path / "b", quantise="mxfp4")
    hf.save(plain, tmp_path / "c", quantise="mxfp4")
    for file in ("b", "c"):
        assert (tmp_path / file / "model.safetensors").read_bytes() == (tmp_path / "a" / "model.safetensors").read_bytes()


def test_another_rule_than_the_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(hf.CheckpointError, match="scale_rule='rceil': the model computes with weights of rule 'floor'"):
        hf.save(built(FLOOR), tmp_path / "a", quantise="mxfp4", scale_rule="rceil")


# what cannot be honoured


@pytest.mark.parametrize(
    ("change", "qat", "low", "says"),
    [
        ({"moe": {"expert_size": 48}}, ON, None, r"model\.moe\.expert_size=48: qat=mxfp4 .* multiple of 32, or qat=none"),
        ({"moe": {"latent_size": 40}}, ON, None, r"model\.moe\.latent_size=40: qat=mxfp4"),
        ({"latent": False, "latent_norm": False, "hidden_size": 80}, ON, None, r"model\.hidden_size=80: qat=mxfp4"),
        ({"moe": {"experts": 0}}, ON, None, "qat=mxfp4: the model has no routed experts"),
        ({}, ON, LowPrecision.fp8, "qat=mxfp4: .* precision=fp8 has blocks of 128"),
        ({}, FLOOR, LowPrecision.mxfp8, r"qat\.rule=floor: .* give qat\.rule=rceil"),
    ],
    ids=str,
)
def test_refusals(change: dict[str, Any], qat: QatConfig, low: LowPrecision | None, says: str) -> None:
    model = config()
    parts = {key: replace(getattr(model, key), **value) if isinstance(value, dict) else value for key, value in change.items()}
    with pytest.raises(ConfigError, match=says):
        k3.build(replace(model, **parts), qat=qat, low_precision=low)
    if low is None:
        k3.build(replace(model, **parts), qat=QatConfig(), device="meta")


# Transformer Engine's products, by the stand-in, which does not round what enters them


def test_products_of_the_library_read_rounded_weights() -> None:
    with te_standin.installed():
        library = k3.build(config(), dtype=torch.float64, low_precision=LowPrecision.mxfp8, qat=ON)
        randomise(library, 0)
        wanted = built(None, torch.float64)
        with torch.no_grad():
            for name, parameter in wanted.named_parameters():
                if ".experts.gate_up" in name or ".experts.down" in name:
                    parameter.copy_(mx.round_trip(parameter, "mxfp4"))
        (losses, gradients), (want, wanted_gradients) = losses_and_gradients(library.train()), losses_and_gradients(wanted)
    torch.testing.assert_close(losses, want, rtol=1e-12, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted_gradients[name], rtol=1e-8, atol=1e-11)
