"""The global batches of a proof: random tokens under a document map and padding that a layout can get wrong."""

from __future__ import annotations

import numpy as np

from data.batch import Batch, StepBatch, collate
from recipes.config import ProofDocuments, ProveConfig

PADDED = 16  # a padded row ends in 1/16, 3/16, 5/16 or 7/16 of padding: up to whole shards of it


class Batches:
    """The stream of data rank `rank` of `of`: its rows of every micro-batch, so that the ranks together read what one would.

    horizon = 1 + MTP layers. `position` is the number of steps taken.
    """

    def __init__(self, cfg: ProveConfig, vocab_size: int, horizon: int, *, rank: int = 0, of: int = 1):
        self.cfg, self.vocab_size, self.horizon = cfg, vocab_size, horizon
        self.rank, self.of = rank, of
        self.position = 0

    def __next__(self) -> StepBatch:
        c = self.cfg
        own = c.batch // self.of
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((c.seed, self.position))))
        tokens = generator.integers(self.vocab_size, size=(c.accumulation * c.batch, c.length + 1))
        micro_batches = []
        for k in range(c.accumulation):
            rows = range(k * c.batch + self.rank * own, k * c.batch + (self.rank + 1) * own)
            micro_batches.append(self._batch(tokens[rows.start : rows.stop], rows))
        self.position += 1
        return StepBatch(micro_batches, self.position - 1, c.accumulation * c.batch * c.length)

    def _batch(self, tokens: np.ndarray, rows: range) -> Batch:
        c = self.cfg
        starts = np.stack([document_starts(c.documents, row, c.length + 1) for row in rows])
        filled = np.ones_like(starts)
        if c.padding:
            for i, row in enumerate(rows):
                if row % 2:
                    first = c.length - c.length * (row % 8) // PADDED
                    filled[i, first:] = False
                    starts[i, first] = True  # no token before predicts padding
        return collate(tokens, starts, horizon=self.horizon, filled=filled)


def document_starts(kind: ProofDocuments, row: int, length: int) -> np.ndarray:
    """bool [length]: where documents begin in global row number `row`; the kinds are explained in recipes/config.py."""
    starts = np.zeros(length, dtype=bool)
    starts[0] = True
    whole = length - 1
    if kind is ProofDocuments.few:
        starts[[whole // 3 + row % 5, 2 * whole // 3 - row % 3]] = True
    elif kind is ProofDocuments.many:
        at, stop = (0, whole // 2) if row % 2 == 0 else (whole // 2, length)
        while at < stop:
            starts[at] = True
            at += 1 + (at + row) % 5
    elif kind is ProofDocuments.crossing:
        for eighth in range(1, 8):
            starts[eighth * whole // 8 - 1 - (row + eighth) % 3] = True
    return starts


def least_length(kind: ProofDocuments) -> int:
    """The shortest rows for which the kind means what it says."""
    return {ProofDocuments.none: 1, ProofDocuments.few: 24, ProofDocuments.many: 12, ProofDocuments.crossing: 32}[kind]
