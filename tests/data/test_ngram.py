"""The baselines against the formulas written out with dictionaries."""

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from data import baselines, heldout
from data.ngram import cross_entropies
from data.prepare import token_array


def by_hand(documents: list[list[int]], pairs: list[tuple[int, int]], vocab_size: int) -> tuple[float, float]:
    unigrams = Counter(w for d in documents for w in d)
    bigrams = Counter(p for d in documents for p in pairwise(d))
    total = sum(unigrams.values())
    once, twice = (sum(c == n for c in bigrams.values()) for n in (1, 2))
    discount = once / (once + 2 * twice) if once else 0.5
    uni = bi = 0.0
    for v, w in pairs:
        p = (unigrams[w] + 1) / (total + vocab_size)
        uni -= math.log(p)
        after = {x: c for (u, x), c in bigrams.items() if u == v}
        if after:
            p = max(after.get(w, 0) - discount, 0) / sum(after.values()) + discount * len(after) / sum(after.values()) * p
        bi -= math.log(p)
    return uni / len(pairs), bi / len(pairs)


@pytest.mark.parametrize("vocab_size", [12, 5000])  # a table of all pairs; a sorted list
@pytest.mark.parametrize("chunk", [7, 1 << 20])
def test_against_dictionaries(vocab_size, chunk, monkeypatch):
    monkeypatch.setattr("data.ngram._CHUNK", chunk)
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 10, size=rng.integers(1, 12)).tolist() for _ in range(25)]
    before, after = rng.integers(0, 12, size=(2, 100))  # some never seen
    got = cross_entropies(np.concatenate(documents), np.array([len(d) for d in documents]), before, after, vocab_size)
    unigram, bigram = by_hand(documents, list(zip(before.tolist(), after.tolist())), vocab_size)
    assert got.unigram == pytest.approx(unigram, rel=1e-12) and got.bigram == pytest.approx(bigram, rel=1e-12)
    assert got.targets == 100


@pytest.mark.parametrize("documents", [[[1], [2]], [[1, 1, 1, 1]]])  # no pair at all; none seen once
def test_degenerate_counts_stay_finite(documents):
    before, after = np.array([1, 2, 3]), np.array([2, 2, 1])
    got = cross_entropies(np.concatenate(documents), np.array([len(d) for d in documents]), before, after, 4)
    assert (got.unigram, got.bigram) == pytest.approx(by_hand(documents, [(1, 2), (2, 2), (3, 1)], 4))


def test_probabilities_sum_to_one():
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 6, size=60)
    for v in range(8):  # 6 and 7 never occur
        each = [cross_entropies(tokens, np.array([30, 30]), np.array([v]), np.array([w]), 8) for w in range(8)]
        assert sum(math.exp(-e.unigram) for e in each) == pytest.approx(1)
        assert sum(math.exp(-e.bigram) for e in each) == pytest.approx(1)


def test_on_the_counted_targets_of_a_real_preparation(cfg, prepared):
    batches = heldout(cfg, prepared)
    got = baselines(prepared, batches)
    tokens, lengths = token_array(prepared, "train")
    documents = [d.tolist() for d in np.split(tokens, np.cumsum(lengths)[:-1])]
    pairs = [(int(b.tokens[i, t]), int(b.labels[i, t])) for b in batches for i, t in b.loss_mask[0].nonzero().tolist()]
    assert (got.unigram, got.bigram) == pytest.approx(by_hand(documents, pairs, prepared.vocab_size))
    assert got.targets == cfg.heldout_tokens and got.bigram < got.unigram < math.log(prepared.vocab_size)


def test_the_result_is_kept_for_the_same_targets_alone(cfg, prepared, monkeypatch):
    first = baselines(prepared, heldout(cfg, prepared))
    other = baselines(prepared, heldout(replace(cfg, heldout_tokens=500), prepared))
    assert other.targets == 500 and other != first

    def unreachable(*_):
        raise AssertionError("counted again")

    monkeypatch.setattr("data.ngram.cross_entropies", unreachable)
    assert baselines(prepared, heldout(replace(cfg, seq_length=9), prepared)) == first
