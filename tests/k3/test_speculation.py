"""Speculative decoding gives the tokens and log-probabilities of plain decoding, whatever the draft proposes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import k3
from k3.config import Gate, OutputGate, Residual
from k3.engine import Engine
from k3.generation.trajectory import Trajectory
from k3.model import Model
from tests.k3.randomise import randomise

GREEDY = k3.Sampling(temperature=0.0, max_new_tokens=12)
SAMPLED = k3.Sampling(temperature=0.8, top_k=50, max_new_tokens=12, stop=tuple(range(0, 256, 32)))
LENGTHS = (1, 2, 63, 64, 125, 150)


@pytest.fixture(scope="module")
def model() -> Model:
    return randomise(k3.build(replace(k3.preset("tiny"), draft=True)))


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def make(samples: int = 3) -> list[Trajectory]:
    return [Trajectory(prompt(n, seed=n), (n, k)) for n in LENGTHS for k in range(samples)]


def results(rows: Sequence[Trajectory]) -> dict[tuple[int, ...], tuple[list[int], list[float], str | None]]:
    return {t.key: (t.tokens, t.logprobs, t.finished) for t in rows}


@pytest.fixture(scope="module")
def agreeing() -> Model:
    """Its draft often says what it says: both read little but the last token's embedding."""
    model = randomise(k3.build(replace(k3.preset("tiny"), draft=True)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "up_proj.weight", ".down")):
                parameter *= 1e-3
        d = model.k3.hidden_size
        layer = model.mtp[0]
        layer.eh_proj.weight.zero_()
        layer.eh_proj.weight[:, :d].copy_(torch.eye(d))
        for module, like in ((layer.enorm, None), (layer.norm, model.norm)):
            module.weight.copy_(torch.ones(d) if like is None else like.weight)
    return model


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft, agrees", [(1, False), (3, True), (7, True)])
def test_tokens_and_log_probabilities_are_those_of_plain_decoding(
    model: Model, agreeing: Model, sampling: k3.Sampling, draft: int, agrees: bool
) -> None:
    model = agreeing if agrees else model
    plain, drafted = make(), make()
    Engine(model, slots=16).run(plain, sampling, seed=5)
    engine = Engine(model, slots=16, draft=draft)
    engine.run(drafted, sampling, seed=5)
    assert results(drafted) == results(plain)
    stats = engine.stats
    assert stats.proposed == draft * stats.verified
    assert stats.decoded == sum(len(t.tokens) - 1 for t in drafted)
    assert not agrees or stats.accepted > 0.1 * stats.proposed, stats
    again = [Trajectory(t.prompt, (*t.key, 1)) for t in drafted]
    fresh = [Trajectory(t.prompt, t.key) for t in again]
    engine.run(again, sampling)
    Engine(model, slots=32, prefix_bytes=0).run(fresh, sampling)
    assert results(again) == results(fresh)


@pytest.mark.parametrize(
    "change",
    [
        {"draft": False},
        {"residual": Residual.sum},
        {"kda": {"gate": Gate.softplus, "output_gate": OutputGate.low_rank, "conv_size": 1}},
        {"mla": {"q_lora_rank": None, "output_gate": False}},
    ],
    ids=str,
)
def test_other_models(change: dict) -> None:
    config = replace(k3.preset("tiny"), draft=True)
    for name, value in change.items():
        config = replace(config, **{name: replace(getattr(config, name), **value) if isinstance(value, dict) else value})
    model = randomise(k3.build(config))
    plain, drafted = make(1), make(1)
    Engine(model, slots=16).run(plain, GREEDY)
    Engine(model, slots=16, draft=2).run(drafted, GREEDY)
    assert results(drafted) == results(plain)


def test_pauses_and_engines_with_and_without(agreeing: Model) -> None:
    """A trajectory may be paused, saved, and go on in an engine with another draft or none."""
    model, sampling = agreeing, replace(SAMPLED, max_new_tokens=24)
    plain, parts = make(), make()
    Engine(model, slots=16).run(plain, sampling)
    for turn, draft in enumerate((3, 0, 2, 2)):
        Engine(model, slots=16, draft=draft).run(parts, sampling, enough=4 * (turn + 1) if turn < 3 else None)
        parts = [Trajectory.from_tensors(t.to_tensors()) for t in parts]
        assert turn == 3 or any(t.state for t in parts)
    assert results(parts) == results(plain)


def test_the_draft_sees_what_it_saw_in_training() -> None:
    """Its proposals are those of the unrolled training pass over the same tokens."""
    model = randomise(k3.build(replace(k3.preset("tiny"), draft=True), dtype=torch.float64))
    row = Trajectory(prompt(70), (0,))
    engine = Engine(model, slots=16, draft=3)
    seen: list[tuple[int, list[int], torch.Tensor]] = []
    drafts = engine._drafts
    assert drafts is not None
    begin, go_on = drafts.begin, drafts.go_on

    def watch_begin(slots, derived, rows, new):  # type: ignore[no-untyped-def]
        out = begin(slots, derived, rows, new)
        seen.append((slots.length[0], [], out[1][0]))
        return out

    def watch_on(slots, derived, step, tokens, state):  # type: ignore[no-untyped-def]
        out = go_on(slots, derived, step, tokens, state)
        seen.append((slots.length[0], [*(seen[-1][1] if step > 1 else []), int(tokens[0])], out[1][0]))
        return out

    drafts.begin, drafts.go_on = watch_begin, watch_on  # type: ignore[method-assign]
    engine.run([row], GREEDY)
    stage, layer = model.stages[0], model.mtp[0]
    text = row.prompt + row.tokens
    assert len(seen) > 12
    for length, own, scores in seen[::5]:
        # the whole unrolled pass over text[:length + 1], in which the draft's own tokens stand behind the last
        tokens = torch.tensor([text[:length]])
        with torch.no_grad():
            context = stage._context(torch.arange(length)[None] == 0, None, 1.0)
            rows = stage._backbone(tokens, context)
            state, earlier = layer.read(stage.output_residual(rows), rows.bank), []
            for step in range(len(own) + 1):
                following = torch.tensor([(text[: length + 1] + own)[step + 1 : step + 1 + length]])
                state, latents = layer.unrolled(state, stage.embedding(following), context, *earlier)
                earlier.append(latents)
            want = stage.head(layer.norm(state))[-1, 0]
        torch.testing.assert_close(scores, want, rtol=1e-9, atol=1e-9)


def test_what_cannot_draft_is_refused() -> None:
    with pytest.raises(ValueError, match="draft=2: needs a model with an MTP layer"):
        Engine(k3.build(replace(k3.preset("tiny"), mtp_layers=0)), draft=2)
