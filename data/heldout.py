"""The fixed evaluation set: excerpts of every held-out document, the same targets whatever the sequence length or batch."""

from __future__ import annotations

import logging

import numpy as np

from data.batch import Batch, collate
from data.config import DataConfig, micro_batch, validate
from data.prepare import Prepared, token_array
from data.stream import shuffled

log = logging.getLogger(__name__)

_SHORTEST = 32  # targets: where there are more documents than tokens for an excerpt of this length, some are left out


def heldout(cfg: DataConfig, prepared: Prepared, horizon: int = 1) -> list[Batch]:
    """Batches with exactly `cfg.heldout_tokens` counted targets of the main loss, or all there are (a log line says so).

    One contiguous excerpt a document, in proportion to its length. The excerpts lie end to end in rows of `cfg.seq_length`; an
    excerpt that crosses a row's edge goes on in the next row with a fresh context, and the last row may be padded. Which targets
    count depends on neither the seed nor the batch; `cfg.micro_batch_size` only groups the rows.
    """
    validate(cfg)
    tokens, lengths = token_array(prepared, "heldout")
    have = int((lengths - 1).sum())
    want = min(cfg.heldout_tokens, have)
    if have < cfg.heldout_tokens:
        log.warning("data.heldout_tokens=%d: the held-out files have only %d; all are used", cfg.heldout_tokens, have)
    documents = _choose(lengths - 1, want)
    if len(documents) < len(lengths):
        log.info("held-out set: excerpts of %d of %d documents", len(documents), len(lengths))
    firsts = np.cumsum(lengths) - lengths
    pieces, starts = [], []
    for document, targets in zip(documents, _shares(lengths[documents] - 1, want)):
        spare = int(lengths[document]) - 1 - int(targets)
        here = int(firsts[document]) + int(np.random.Philox(int(document)).random_raw() % (spare + 1))
        pieces.append(tokens[here : here + int(targets) + 1])
        starts.append(np.arange(int(targets) + 1) == 0)
    return _batches(np.concatenate(pieces), np.concatenate(starts), prepared.eos, cfg, horizon)


def _choose(targets: np.ndarray, want: int) -> np.ndarray:
    """Documents to take excerpts of, sorted: all, or so many, chosen without regard to content, that excerpts are not crumbs."""
    limit = max(1, want // _SHORTEST)
    if len(targets) <= limit:
        return np.arange(len(targets))
    order = shuffled(len(targets), 0)
    enough = int(np.searchsorted(np.cumsum(targets[order]), want)) + 1
    return np.sort(order[: max(limit, enough)])


def _shares(targets: np.ndarray, want: int) -> np.ndarray:
    """`want` split in proportion to `targets`, at least 1 and at most all of each: sums to `want` exactly."""
    shares = np.maximum(1, targets * want // targets.sum())
    rest = want - int(shares.sum())
    by_length = np.argsort(-targets, kind="stable")
    while rest:  # a few rounds: rounding leaves under one target a document
        step = 1 if rest > 0 else -1
        able = by_length[(shares[by_length] < targets[by_length]) if step > 0 else (shares[by_length] > 1)][: abs(rest)]
        shares[able] += step
        rest -= step * len(able)
    return shares


def _batches(tokens: np.ndarray, starts: np.ndarray, fill: int, cfg: DataConfig, horizon: int) -> list[Batch]:
    length = cfg.seq_length
    count = -(-(len(tokens) - 1) // length)
    line = np.full(count * length + 1, fill, dtype=np.int64)
    line[: len(tokens)] = tokens
    begins = np.zeros(len(line), dtype=bool)
    begins[: len(tokens)] = starts
    begins[len(tokens) : len(tokens) + 1] = True  # the padding is no one's continuation
    filled = np.arange(len(line)) < len(tokens)
    cut = np.arange(count)[:, None] * length + np.arange(length + 1)
    size = micro_batch(cfg)
    rows = [cut[i : i + size] for i in range(0, count, size)]
    return [collate(line[r], begins[r], horizon=horizon, filled=filled[r]) for r in rows]
