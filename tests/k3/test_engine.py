"""What generation must keep exactly: cached equals cold, a trajectory is its own, the training pass says the same."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import k3
from k3.config import Attention, Gate, OutputGate, Residual
from k3.engine import Engine
from k3.generation.sampling import draw, uniforms
from k3.generation.trajectory import Trajectory
from k3.model import Model
from kernels.conv import short_conv
from kernels.conv.step import conv_step
from kernels.experts import grouped_mlp
from kernels.experts.grouped import even
from kernels.kda import kda
from kernels.kda.step import kda_step
from kernels.situ import situ_glu
from parallel.experts import AllToAll
from tests.k3.randomise import randomise

SAMPLING = k3.Sampling(max_new_tokens=12)
GREEDY = replace(SAMPLING, temperature=0.0)


@pytest.fixture(scope="module")
def model() -> Model:
    return randomise(k3.build(k3.preset("tiny")))


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def results(rows: Sequence[Trajectory]) -> dict[tuple[int, ...], tuple[list[int], list[float], str | None]]:
    return {t.key: (t.tokens, t.logprobs, t.finished) for t in rows}


def alone(model: Model, t: Trajectory, sampling: k3.Sampling = SAMPLING, **sizes: int) -> Trajectory:
    """The same trajectory from an engine of its own without a cache."""
    cold = Trajectory(list(t.prompt), t.key)
    Engine(model, **{"slots": 16, "prefix_bytes": 0, **sizes}).run([cold], sampling)
    return cold


def test_cached_equals_cold_at_every_hit_boundary(model: Model) -> None:
    base = prompt(100)
    engine = Engine(model, slots=16, block=16)
    engine.run([Trajectory(base, (0,))], SAMPLING)
    for shared in (0, 1, 16, 17, 32, 48, 64, 80, 96, 100):
        for more in (0, 5):
            t = Trajectory(base[:shared] + prompt(more, seed=7), (shared, more))
            if not t.prompt:
                continue
            before = engine.stats.reused
            engine.run([t], SAMPLING)
            hit = engine.stats.reused - before
            assert hit >= min(shared // 16 * 16, len(t.prompt) - (0 if (shared, more) == (100, 0) else 1) // 16 * 16) - 16
            assert (shared, more) != (100, 0) or hit == 100
            assert results([t]) == results([alone(model, t, block=16)])
    assert engine.stats.cleared == 0


def test_a_trajectory_is_its_own(model: Model) -> None:
    """Whatever shares the batch, in any order, in any number of slots, from the cache or not."""
    lengths = (1, 16, 63, 64, 65, 130, 40, 40)
    rows = [Trajectory(prompt(n, seed=i), (i, k)) for i, n in enumerate(lengths) for k in range(5)]
    Engine(model, slots=48).run(rows, SAMPLING)
    want = results(rows)
    assert len({tuple(t.tokens) for t in rows}) == len(rows)
    again = [Trajectory(list(t.prompt), t.key) for t in reversed(rows)]
    Engine(model, slots=16, prefix_bytes=1 << 16).run(again, SAMPLING)
    assert results(again) == want
    for t in rows[::7]:
        assert results([alone(model, t)]) == results([t])


def test_paused_and_resumed_equals_unpaused(model: Model) -> None:
    """Partial rollouts, and through a checkpoint: finished ones first, the others go on from their states."""
    sampling = replace(SAMPLING, max_new_tokens=30, stop=tuple(range(0, 256, 16)))
    make = lambda: [Trajectory(prompt(20 + i, seed=i), (i, k)) for i in range(4) for k in range(5)]
    whole, parts = make(), make()
    Engine(model, slots=16).run(whole, sampling)
    assert {t.finished for t in whole} == {"stop", "length"}
    engine, prefilled = Engine(model, slots=16), []
    for enough in (5, 10, 15, None):
        engine.run(parts, sampling, enough=enough)
        assert sum(t.finished is not None for t in parts) >= (enough or 20)
        assert enough not in (5, 10) or any(t.state for t in parts)
        prefilled.append(engine.stats.prefilled)
        saved = io.BytesIO()
        torch.save([t.to_tensors() for t in parts], saved)
        saved.seek(0)
        parts = [Trajectory.from_tensors(x) for x in torch.load(saved)]
    assert results(parts) == results(whole)
    assert prefilled[-1] == sum(20 + i for i in range(4))  # every prompt once
    for t in whole:
        assert (t.tokens[-1] in sampling.stop) == (t.finished == "stop") and t.state is None


def test_without_its_state_a_trajectory_is_computed_again(model: Model) -> None:
    t = Trajectory(prompt(20), (0,))
    engine = Engine(model, slots=16)
    engine.run([t], replace(SAMPLING, max_new_tokens=5))
    t.finished = None
    engine.run([t], SAMPLING)
    assert t.tokens == alone(model, t).tokens and engine.stats.prefilled == 20 + 25 - 16 * ((20 // 64) > 0)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"attention": Attention.mla},
        {"residual": Residual.sum},
        {"latent": False, "latent_norm": False, "dense_layers": 3},
        {"kda": {"gate": Gate.softplus, "output_gate": OutputGate.low_rank}},
        {"kda": {"conv_size": 1, "output_gate": OutputGate.none}},
        {"mla": {"q_lora_rank": None, "output_gate": False}},
        {"mla": {"rope_dim": 0}},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_probabilities_are_those_of_the_training_pass(change: dict, dtype: torch.dtype) -> None:
    config = k3.preset("tiny")
    for name, value in change.items():
        value = replace(getattr(config, name), **value) if isinstance(value, dict) else value
        config = replace(config, **{name: value})
    model = randomise(k3.build(config, dtype=dtype)).train()
    sampling = k3.Sampling(temperature=0.7, top_k=20, max_new_tokens=20)
    rows = [Trajectory(prompt(n, seed=n), (n,)) for n in (3, 64, 150)]
    engine = Engine(model, slots=16)
    engine.run(rows, sampling)
    assert engine.mismatch(rows, sampling) < (1e-10 if dtype == torch.float64 else 3e-4)
    assert all(module.training for module in model.modules())
    rows[1].logprobs[3] += 0.5
    assert engine.mismatch(rows, sampling) > 0.4


def test_greedy_is_the_argmax_of_whole_passes() -> None:
    model = randomise(k3.build(k3.preset("tiny"), dtype=torch.float64))
    rows = torch.tensor([prompt(70, seed=s) for s in range(3)])
    naive = k3.generate(lambda tokens: model(tokens), rows, 12, temperature=0.0)
    assert torch.equal(k3.generate(model, rows, 12, temperature=0.0), naive)
    drawn = k3.generate(lambda tokens: model(tokens), rows, 12, top_k=40, seed=3)
    assert torch.equal(k3.generate(model, rows, 12, top_k=40, seed=3), drawn)
    assert not torch.equal(k3.generate(model, rows, 12, top_k=40, seed=4), drawn)


def test_the_cache_notices_changed_weights(model: Model) -> None:
    mine = randomise(k3.build(k3.preset("tiny")))
    engine, base = Engine(mine, slots=16), prompt(130)
    for parameter in (mine.layers["1"].feed_forward.experts.down, mine.layers["3"].attention.kv_b_proj.weight):  # type: ignore[union-attr]
        engine.run([Trajectory(base, (0,))], SAMPLING)
        parameter.data.view(-1)[5] += 0.25  # behind autograd's back, as an optimizer's flat buffer does
        t = Trajectory(base, (1,))
        engine.run([t], SAMPLING)
        assert results([t]) == results([alone(mine, t)])
    assert engine.stats.cleared == 2


def test_samples_of_one_prompt_compute_it_once_and_the_cache_stays_small(model: Model) -> None:
    engine = Engine(model, slots=16, block=16, prefix_bytes=400_000)
    for i in range(4):
        engine.run([Trajectory(prompt(100, seed=i), (k,)) for k in range(20)], GREEDY)
        assert engine.stats.prefilled == 100 * (i + 1)
        assert engine._prefixes.bytes <= 400_000
    assert len(engine._prefixes) > 6
    held = sum(node.bytes for node in engine._prefixes._nodes.values())
    assert held == engine._prefixes.bytes
    engine.clear()
    assert not len(engine._prefixes) and not engine._prefixes.bytes


def test_what_makes_no_sense_is_refused(model: Model) -> None:
    engine = Engine(model, slots=16)
    for rows, word in (
        ([Trajectory([], (0,))], "empty"),
        ([Trajectory([300], (0,))], "vocabulary"),
        ([Trajectory([1], (0,)), Trajectory([2], (0,))], "same key"),
    ):
        with pytest.raises(ValueError, match=word):
            engine.run(rows, SAMPLING)
    for wrong in ({"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"max_new_tokens": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            k3.Sampling(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="block=24"):
        Engine(model, block=24)


def test_draws_follow_the_distribution_and_its_cuts() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -40.0]]).expand(16, -1)
    numbers = uniforms([9] * 4000, range(4000))
    assert numbers.min() >= 0 and numbers.max() < 1 and abs(numbers.mean() - 0.5) < 0.02
    for sampling in (k3.Sampling(), k3.Sampling(0.5), k3.Sampling(top_k=2), k3.Sampling(top_p=0.7)):
        counts, kept = torch.zeros(6), {}
        for start in range(0, 4000, 16):
            for token, logp in zip(*draw(logits, sampling, numbers[start : start + 16])):
                counts[token] += 1
                kept[token] = logp
        want = torch.tensor([kept.get(i, -torch.inf) for i in range(6)]).exp()
        assert abs(want.sum() - 1) < 1e-5
        assert (counts / 4000 - want).abs().max() < 0.03
        assert len(kept) == {"top_k": 2, "top_p": 2}.get("top_k" if sampling.top_k else "top_p" if sampling.top_p < 1 else "", 5)
    last = draw(logits, k3.Sampling(), uniforms([9], [0]) * 0 + (1 - 2.0**-53))[0]
    assert last == [4]  # never a token without probability


def test_steps_are_the_operators_one_token_at_a_time() -> None:
    g = torch.Generator().manual_seed(0)
    new = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    r, t, h, k = 3, 9, 2, 8
    q, key, v, z, beta, a_log, bias = (
        new(r, t, h, k),
        new(r, t, h, k),
        new(r, t, h, k),
        new(r, t, h, k),
        new(r, t, h),
        new(h),
        new(h, k),
    )
    for gate in ("bounded", "softplus"):
        state = new(r, h, k, k)
        want, last = kda(q, key, v, z, beta, a_log, bias, gate=gate, initial_state=state, backend="recurrent")
        for i in range(t):
            both = torch.stack([q[:, i], key[:, i]], 1)
            out = kda_step(both, v[:, i], z[:, i], beta[:, i], a_log.exp()[:, None], bias, state, gate=gate)
            torch.testing.assert_close(out, want[:, i], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(state, last, rtol=1e-12, atol=1e-13)
    for width in (1, 2, 4):
        x, taps, before = new(r, t, 5), new(5, width), new(r, width - 1, 5)
        want, last = short_conv(x, taps, initial_state=before)
        past = before.transpose(0, 1).clone()
        for i in range(t):
            torch.testing.assert_close(conv_step(x[:, i], taps.t(), past), want[:, i], rtol=1e-12, atol=1e-13)
        assert torch.equal(past.transpose(0, 1), last)


def test_passes_without_gradients_are_the_same_bits(model: Model) -> None:
    """Sorting in place of megatron-core's dispatch, and plain products in place of its linear layers."""
    tokens = torch.tensor([prompt(48, seed=s) for s in range(2)])
    want = model.eval()(tokens)
    with torch.no_grad():
        assert torch.equal(model(tokens), want)
    dispatch = model.layers["1"].feed_forward.dispatch  # type: ignore[union-attr]
    assert isinstance(dispatch, AllToAll)
    g = torch.Generator().manual_seed(0)
    x, scores = torch.randn(33, 8, generator=g), torch.rand(33, 16, generator=g)
    chosen, weights = scores.topk(2).indices, torch.rand(33, 2, generator=g)
    theirs = dispatch.dispatch(x, chosen, weights)
    scale = lambda routed: routed.tokens * routed.probabilities[:, None]
    back = dispatch.combine(scale(theirs))
    with torch.no_grad():
        ours = dispatch.dispatch(x, chosen, weights)
        for name in ("tokens", "counts", "probabilities"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        assert torch.equal(dispatch.combine(scale(ours)), back)


def test_latents_beyond_a_page(model: Model) -> None:
    """Rows whose lengths lie pages apart; every page added is one of the same shape."""
    rows = [Trajectory(prompt(n, seed=n), (n,)) for n in (2, 120, 127, 128, 250, 400)]
    Engine(model, slots=16).run(rows, SAMPLING)
    for t in rows:
        assert results([alone(model, t)]) == results([t])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_experts_without_gradients_are_the_same_bits_however_crowded(dtype: torch.dtype) -> None:
    """One even batch, or one product an expert where that would grow too large: no token's result tells which."""
    g = torch.Generator().manual_seed(0)
    for experts, width, inner in ((16, 32, 32), (32, 64, 64), (8, 128, 96)):
        gate_up, down = (torch.randn(experts, *s, generator=g, dtype=dtype) for s in ((2 * inner, width), (width, inner)))
        seen = set()
        for crowd in (1, 3, 16, 17, 200):
            counts = torch.randint(0, 6, (experts,), generator=g)
            counts[3] = crowd
            x, probs = torch.randn(int(counts.sum()), width, generator=g, dtype=dtype), torch.rand(int(counts.sum()), generator=g)
            probs = probs.to(dtype)
            want = grouped_mlp(x, counts, gate_up, down, situ_glu, probs)
            with torch.no_grad():
                seen.add(even(x, counts) is None)
                assert torch.equal(grouped_mlp(x, counts, gate_up, down, situ_glu, probs), want), (experts, crowd)
        assert seen == {True, False}
