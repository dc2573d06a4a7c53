"""Packing and collating of sampled trajectories: every sampled token is a counted label exactly once, at its place."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.rl.batch import Sampled, collate, once, pack, set_baselines

FILL = 999
sizes = st.lists(st.integers(1, 12), min_size=1, max_size=12)


@given(st.lists(st.integers(1, 20), max_size=30), st.integers(20, 40))
def test_every_item_lies_in_one_row_that_has_room(lengths: list[int], capacity: int) -> None:
    rows = pack(lengths, capacity)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in row) <= capacity for row in rows)
    fill = sorted(sum(lengths[i] for i in row) for row in rows)
    assert len(fill) < 2 or fill[0] + fill[1] > capacity, "two rows would fit one"


def test_what_fits_no_row_is_refused() -> None:
    with pytest.raises(ValueError, match="a sequence of 9 tokens does not fit a row of 8"):
        pack([3, 9], 8)


def test_what_a_group_holds_several_times_is_there_once() -> None:
    """Where anything differs that the loss reads, they stay apart."""
    one = lambda tokens=(1, 2), behaviour=(-1.0, -2.0), stale=0, advantage=0.5: Sampled([7], tokens, behaviour, stale, advantage)
    others = [one((1, 3)), one(behaviour=(-1.0, -2.5)), one(stale=1), one(advantage=0.25)]
    found = once([one(), others[0], one(), *others[1:], one()])
    assert [(f.tokens, f.times) for f in found] == [((1, 2), 3), *((o.tokens, 1) for o in others)]


def test_a_token_is_compared_with_what_others_drew_after_the_same_tokens() -> None:
    """By hand, and merged trajectories as their repetitions would be."""

    def one(tokens: str, *ratios: float, times: int = 1) -> Sampled:
        drawn = [-0.5] * len(ratios)
        return Sampled([7], [ord(t) for t in tokens], drawn, teacher=[r - 0.5 for r in ratios], times=times)

    group = [one("ab", 1.0, 0.5), one("ac", 1.0, -9.0), one("ac", 1.0, -9.0), one("dc", -0.25, 1.75), one("abe", 1.0, 0.5, 0.125)]
    set_baselines(group, limit=2.0)
    of_first = (1.0 + 1.0 - 0.25 + 1.0) / 4
    assert [value for o in group for value in o.baseline or ()] == pytest.approx([
        of_first, (-2.0 - 2.0 + 0.5) / 3, *[of_first, (0.5 - 2.0 + 0.5) / 3] * 2, 1.0, 0.0, of_first, (0.5 - 4.0) / 3, 0.0,
    ])  # fmt: skip
    merged = [group[0], one("ac", 1.0, -9.0, times=2), *group[3:]]
    set_baselines(merged, limit=2.0)
    assert [o.baseline for o in merged] == [o.baseline for o in (group[0], group[1], *group[3:])]


@st.composite
def trajectories(draw: st.DrawFn) -> list[Sampled]:
    """With tokens that say which they are: no two are alike."""
    made, number = [], 1000
    taught = draw(st.booleans())
    for _ in range(draw(st.integers(1, 8))):
        prompt, tokens = draw(st.integers(1, 6)), draw(st.integers(1, 6))
        ids = list(range(number, number + prompt + tokens))
        number += 100
        more: dict = {"advantage": float(number)}
        if taught:
            more = {"teacher": [-float(t) - 0.25 for t in ids[prompt:]], "baseline": [float(t) for t in ids[prompt:]]}
        drawn = [-float(t) for t in ids[prompt:]]
        more["times"] = draw(st.integers(1, 3))
        made.append(Sampled(ids[:prompt], ids[prompt:], drawn, draw(st.integers(0, tokens)), **more))
    return made


@settings(deadline=None)
@given(trajectories(), st.integers(12, 40), st.integers(0, 2))
def test_every_sampled_token_is_a_counted_label_once(made: list[Sampled], length: int, empty: int) -> None:
    rows = [[made[i] for i in items] for items in pack([len(one) for one in made], length)] + [[]] * empty
    batch = collate(rows, length, FILL)
    assert batch.tokens.shape == (len(rows), length) and batch.loss_mask.shape == (1, len(rows), length)
    mask = batch.loss_mask[0]
    assert sorted(batch.labels[mask].tolist()) == sorted(t for one in made for t in one.tokens)
    padding = torch.zeros_like(mask) if batch.padding is None else batch.padding
    assert not (padding & mask).any() and (batch.tokens[padding] == FILL).all()
    assert int((~padding).sum()) == sum(len(one) for one in made)
    # every document is one trajectory, each token in it followed by its label, and padding is a document of its own
    seen = []
    for b in range(len(rows)):
        edges = [*np.flatnonzero(batch.document_starts[b]).tolist(), length]
        assert edges[0] == 0
        for first, end in pairwise(edges):
            if padding[b, first]:
                assert padding[b, first:end].all() and not mask[b, first:end].any()
                continue
            ids = [*batch.tokens[b, first:end].tolist(), int(batch.labels[b, end - 1])]
            assert batch.labels[b, first:end].tolist() == ids[1:]
            one = next(one for one in made if [*one.prompt, *one.tokens] == ids)
            seen.append(ids)
            counted = mask[b, first:end]
            assert counted.tolist() == [False] * (len(one.prompt) - 1) + [True] * len(one.tokens)
            assert batch.behaviour[b, first:end][counted].tolist() == one.behaviour
            assert batch.fresh[b, first:end][counted].tolist() == [not one.stale] * len(one.tokens)
            assert (batch.baseline is None) == (one.baseline is None)
            if batch.baseline is not None:
                assert batch.baseline[b, first:end][counted].tolist() == one.baseline
            assert one.times == 1 if batch.times is None else (batch.times[b, first:end][counted] == one.times).all()
            said = batch.advantage if one.teacher is None else batch.teacher
            assert said is not None and (batch.advantage is None) == (one.teacher is not None)
            assert said[b, first:end][counted].tolist() == (
                [one.advantage] * len(one.tokens) if one.teacher is None else one.teacher
            )
    assert len(seen) == len(made)
    weights = mask if batch.times is None else batch.times
    for values in (batch.behaviour, batch.fresh, weights, batch.advantage if batch.teacher is None else batch.teacher):
        assert values is not None and not values[~mask].any()
