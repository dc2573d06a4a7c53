"""Rows for long context: their shares, what is in them, and the same contract as the ordinary stream's."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch

from data import DataError, LongConfig, recall, stream, validate
from data.contexts import contexts
from data.draws import Draws
from data.facts import Facts, is_heldout, plant
from data.long import LongSamples, Text
from data.prepare import token_array
from data.stream import Samples

LENGTH = 256


@pytest.fixture(scope="module")
def long_cfg(cfg):
    return replace(cfg, seq_length=LENGTH, long=LongConfig(documents=0.4, recall=0.4, facts=4))


@pytest.fixture(scope="module")
def samples(long_cfg, prepared):
    return LongSamples(prepared, long_cfg)


def rows_of(steps) -> list[list[torch.Tensor]]:
    return [[torch.cat([getattr(b, n) for b in s.micro_batches]) for n in ("tokens", "labels", "document_starts")] for s in steps]


def equal(one, other) -> bool:
    return all(torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y))


@pytest.mark.parametrize(("of", "micro"), [(2, 2), (3, 4), (12, 1)])
def test_the_union_of_ranks_is_the_one_stream(of, micro, long_cfg, prepared):
    alone = rows_of(islice(stream(replace(long_cfg, micro_batch_size=1), prepared), 4))
    ranks = [stream(replace(long_cfg, micro_batch_size=micro), prepared, rank=r, of=of) for r in range(of)]
    for whole in alone:
        shares = [next(r).micro_batches for r in ranks]
        joined = [torch.cat([getattr(b, n) for g in zip(*shares) for b in g]) for n in ("tokens", "labels", "document_starts")]
        assert equal([joined], [whole])


def test_resuming_at_a_position_is_going_on(long_cfg, prepared):
    running = rows_of(islice(stream(long_cfg, prepared), 9))
    assert equal(running[6:], rows_of(islice(stream(long_cfg, prepared, position=6), 3)))
    assert not equal(running[:1], rows_of(islice(stream(replace(long_cfg, seed=1), prepared), 1)))


def test_without_shares_the_stream_is_the_ordinary_one(cfg, prepared):
    assert isinstance(stream(cfg, prepared)._samples, Samples)
    none, hardly = (replace(cfg, seq_length=LENGTH, long=LongConfig(documents=share)) for share in (0.0, 1e-12))
    assert equal(*(rows_of(islice(stream(c, prepared), 3)) for c in (none, hardly)))


def test_every_step_has_nearly_its_share_of_each_kind(samples):
    kinds = [samples.kind(i) for i in range(1200)]
    for first in range(0, 1200, 12):
        here = kinds[first : first + 12]
        assert abs(here.count("documents") - 4.8) < 2 and abs(here.count("recall") - 4.8) < 2
    assert abs(kinds.count("documents") - 480) < 4 and abs(kinds.count("recall") - 480) < 4


def test_rows_are_one_context_without_ends_of_text(samples, prepared):
    seen = set()
    for i in range(60):
        tokens, starts = samples[i]
        assert tokens.shape == starts.shape == (LENGTH + 1,)
        if (kind := samples.kind(i)) != "ordinary":
            seen.add(kind)
            assert starts.tolist() == [True] + [False] * LENGTH
            assert prepared.eos not in tokens[:-1]
    assert seen == {"documents", "recall"}


def test_rows_of_documents_are_stretches_of_the_longest_ones(samples, prepared):
    tokens, lengths = token_array(prepared, "train")
    firsts = np.cumsum(lengths) - lengths
    long = [tokens[f : f + n] for f, n in zip(firsts, lengths) if n > LENGTH]
    assert len(long) == samples.whole > 3
    inside = joined = 0
    for i in (i for i in range(100) if samples.kind(i) == "documents"):
        row = samples[i][0]
        windows = (np.lib.stride_tricks.sliding_window_view(d, LENGTH + 1) for d in long)
        inside += any((w == row).all(1).any() for w in windows)
        joined += 1
    assert inside == joined


def test_where_no_document_is_long_enough_neighbours_follow(cfg, prepared):
    text = Text(prepared.dataset("train"), prepared.eos)
    pool, whole = text.longest(10**6)
    assert whole == 0 and text.lengths[pool].sum() * 16 >= text.lengths.sum() and len(pool) < len(text.lengths)
    tokens, lengths = token_array(prepared, "train")
    last = len(lengths) - 1
    line = np.concatenate([tokens, tokens])[int(lengths[:last].sum()) :]
    wanted = line[line != prepared.eos][:900]
    assert np.array_equal(text.run(last, 0, 900), wanted), "after the last document comes the first"


def test_facts_are_asked_once_with_the_answer_that_was_told(prepared):
    facts, tokenizer = Facts(prepared.tokenizer()), prepared.tokenizer()
    chosen = facts.draw(Draws(3), 6, heldout=False)
    filler = np.full(100, prepared.eos)
    tokens, answers = plant(filler, chosen, [0, 5, 5, 9, 30, 20], chosen[::-1], [100, 60, 61, 70, 80, 99])
    assert len(tokens) == len(answers) == 100 + 2 * sum(len(f.line) for f in chosen)
    assert sum(tokens == prepared.eos) == 100
    text = tokenizer.decode(tokens[tokens != prepared.eos])
    for fact in chosen:
        assert text.count(tokenizer.decode(fact.asked)) == 2 == text.count(tokenizer.decode(fact.line).rstrip("\n"))
    expected = [fact.answer for fact in sorted(chosen[::-1], key=lambda f: [100, 60, 61, 70, 80, 99][chosen[::-1].index(f)])]
    assert tokens[answers].tolist() == [i for answer in expected for i in answer]


def test_held_out_facts_are_no_training_facts(prepared):
    facts, tokenizer = Facts(prepared.tokenizer()), prepared.tokenizer()
    sides = {}
    for held in (False, True):
        drawn = [f for seed in range(20) for f in facts.draw(Draws(seed), 6, heldout=held)]
        sides[held] = {tokenizer.decode(f.line) for f in drawn}
        words = [line.split() for line in sides[held]]
        assert all(is_heldout(key, value) is held for _, key, _, value in words)
        assert len({f.asked for f in facts.draw(Draws(1), 20, heldout=held)}) >= 18
    assert sides[False] and sides[True] and not sides[False] & sides[True]


def test_more_facts_than_words_are_refused(prepared):
    facts = Facts(prepared.tokenizer())
    with pytest.raises(DataError, match=r"data\.long\.facts=10000: .*words for"):
        facts.draw(Draws(0), 10000, heldout=False)


def test_recall_counts_answers_alone_at_controlled_distances(cfg, prepared):
    tokenizer = prepared.tokenizer()
    for length, batches in recall(cfg, prepared, [128, 512], rows=5, facts=2).items():
        tokens = torch.cat([b.tokens for b in batches])
        labels = torch.cat([b.labels for b in batches])
        mask = torch.cat([b.loss_mask for b in batches], 1)
        assert tokens.shape == (5, length) and mask.shape == (1, 5, length)
        for row in range(5):
            places = mask[0, row].nonzero().squeeze(1).tolist()
            assert places and places[0] > length // 2
            text = tokenizer.decode([*tokens[row].tolist(), int(labels[row, -1])])
            answers = tokenizer.decode(labels[row, mask[0, row]].tolist()).split()
            assert len(answers) == 2
            for line in {line for line in text.split("\n") if line.startswith("key ") and " = " in line}:
                first, second = (i for i in range(len(text)) if text.startswith(line + "\n", i))
                assert second - first > len(text) / 3
                assert all(word in answers for word in line.split(" = ")[1].split())


def test_recall_does_not_depend_on_batch_or_seed(cfg, prepared):
    one = recall(cfg, prepared, [128], rows=3, facts=2)[128]
    other = recall(replace(cfg, seed=9, batch_size=1, micro_batch_size=1, seq_length=7), prepared, [128], rows=3, facts=2)[128]
    assert all(torch.equal(a.tokens, b.tokens) and torch.equal(a.loss_mask, b.loss_mask) for a, b in zip(one, other, strict=True))


def test_recall_refuses_rows_without_room(cfg, prepared):
    with pytest.raises(DataError, match=r"recall at length 64: .*128 tokens or more"):
        recall(cfg, prepared, [64])


def test_contexts_have_the_same_targets_at_every_length(cfg, prepared):
    sets = contexts(cfg, prepared, [32, 64, 256])
    targets = {n: torch.cat([b.labels[b.loss_mask[0]] for b in batches]) for n, batches in sets.items()}
    assert len(targets[32]) == len(targets[256]) >= 256 and len(targets[256]) % 256 == 0
    assert torch.equal(targets[32], targets[256]) and torch.equal(targets[64], targets[256])
    assert all(b.tokens.shape[1] == n for n, batches in sets.items() for b in batches)
    with pytest.raises(DataError, match="length 48 must divide the longest, 256"):
        contexts(cfg, prepared, [48, 256])


@pytest.mark.parametrize(
    ("long", "length", "message"),
    [
        (LongConfig(documents=1.5), 256, r"data\.long\.documents=1\.5: a share"),
        (LongConfig(documents=0.7, recall=0.5), 256, r"data\.long\.recall=0\.5: with data\.long\.documents=0\.7 more than all"),
        (LongConfig(recall=0.5, facts=0), 256, r"data\.long\.facts=0: must be at least 1"),
        (LongConfig(recall=0.5), 64, r"data\.long\.recall=0\.5: .*data\.seq_length=64; give 128"),
    ],
)
def test_shares_that_cannot_be_are_refused(long, length, message, cfg):
    with pytest.raises(DataError, match=message):
        validate(replace(cfg, seq_length=length, long=long))


def test_the_draws_stay_what_they_are():
    """Another sequence would silently change the rows of a resumed run."""
    draws = Draws(3, 1)
    assert ([draws.below(10) for _ in range(6)], draws.order(6).tolist()) == ([8, 9, 9, 6, 9, 1], [4, 2, 3, 0, 1, 5])
