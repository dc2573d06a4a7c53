"""What counting alone achieves on the held-out set: the lines a model has to beat."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b

import numpy as np

from data.batch import Batch
from data.prepare import Prepared, token_array

log = logging.getLogger(__name__)

_CHUNK = 1 << 22  # tokens counted at once
_DENSE = 1 << 24  # pairs up to which a table of all pairs is the faster way to count


@dataclass(frozen=True)
class Baselines:
    """Mean cross-entropy in nats a token over the counted targets."""

    unigram: float
    bigram: float
    targets: int


def baselines(prepared: Prepared, heldout_batches: Sequence[Batch]) -> Baselines:
    """Unigram (add-one) and bigram (absolute discounting, the rest from the unigram) on the counted targets of the main loss.

    Counts come from every training token; pairs never cross a document's border. The discount is n1 / (n1 + 2 n2), where n1 and
    n2 are the numbers of pairs seen once and twice. The result is kept in the prepared folder.
    """
    before, after = _counted(heldout_batches)
    digest = blake2b(before.tobytes() + after.tobytes(), digest_size=8).hexdigest()
    cache = prepared.folder / f"baselines-{digest}.json"
    try:
        return Baselines(**json.loads(cache.read_text()))
    except (OSError, ValueError, TypeError):
        pass
    tokens, lengths = token_array(prepared, "train")
    result = cross_entropies(tokens, lengths, before, after, prepared.vocab_size)
    try:
        part = cache.with_suffix(f".{os.getpid()}.tmp")
        part.write_text(json.dumps(asdict(result)) + "\n")
        part.replace(cache)
    except OSError as problem:  # a shared folder may be read-only: the numbers are right all the same
        log.info("data: baselines not kept (%s)", problem)
    return result


def cross_entropies(tokens: np.ndarray, lengths: np.ndarray, before: np.ndarray, after: np.ndarray, vocab_size: int) -> Baselines:
    """As `baselines`: training tokens with document lengths, and the pairs (before, after) to predict, each [N] int64."""
    unigrams = np.zeros(vocab_size, dtype=np.int64)
    for first in range(0, len(tokens), _CHUNK):
        unigrams += np.bincount(tokens[first : first + _CHUNK], minlength=vocab_size)
    p_unigram = (unigrams[after] + 1) / (len(tokens) + vocab_size)

    pairs, counts = _count_pairs(tokens, lengths, vocab_size)
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    discount = once / (once + 2 * twice) if once else 0.5  # none seen once: some mass must still go to unseen pairs
    context = pairs // vocab_size
    followed = np.bincount(context, weights=counts, minlength=vocab_size)[before]  # how often `before` has a successor
    kinds = np.bincount(context, minlength=vocab_size)[before]  # by how many different ones
    wanted = before * vocab_size + after
    place = np.searchsorted(pairs, wanted).clip(max=max(0, len(pairs) - 1))
    seen = np.where(pairs[place] == wanted, counts[place], 0) if len(pairs) else np.zeros(len(wanted))
    total = np.maximum(followed, 1)
    p_bigram = np.where(
        followed > 0, np.maximum(seen - discount, 0) / total + discount * kinds / total * p_unigram, p_unigram
    )  # fmt: skip
    return Baselines(float(-np.log(p_unigram).mean()), float(-np.log(p_bigram).mean()), len(after))


def _counted(batches: Sequence[Batch]) -> tuple[np.ndarray, np.ndarray]:
    before = np.concatenate([b.tokens[b.loss_mask[0]].cpu().numpy() for b in batches])
    after = np.concatenate([b.labels[b.loss_mask[0]].cpu().numpy() for b in batches])
    return before, after


def _pair_chunks(tokens: np.ndarray, lengths: np.ndarray, vocab_size: int) -> Iterator[np.ndarray]:
    ends = np.cumsum(lengths) - 1  # a document's last token has no successor
    for first in range(0, len(tokens) - 1, _CHUNK):
        here = np.asarray(tokens[first : first + _CHUNK + 1], dtype=np.int64)
        inside = np.ones(len(here) - 1, dtype=bool)
        low, high = np.searchsorted(ends, [first, first + len(inside)])
        inside[ends[low:high] - first] = False
        yield (here[:-1] * vocab_size + here[1:])[inside]


def _count_pairs(tokens: np.ndarray, lengths: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(pairs as before * vocab_size + after, ascending; how often each occurs), over all documents."""
    if vocab_size**2 <= _DENSE:
        table = np.zeros(vocab_size**2, dtype=np.int64)
        for chunk in _pair_chunks(tokens, lengths, vocab_size):
            table += np.bincount(chunk, minlength=len(table))
        pairs = table.nonzero()[0]
        return pairs, table[pairs]
    pairs = counts = np.zeros(0, dtype=np.int64)
    for chunk in _pair_chunks(tokens, lengths, vocab_size):
        new, times = np.unique(chunk, return_counts=True)
        merged, where = np.unique(np.concatenate([pairs, new]), return_inverse=True)
        counts = np.bincount(where, weights=np.concatenate([counts, times]), minlength=len(merged)).astype(np.int64)
        pairs = merged
    return pairs, counts
