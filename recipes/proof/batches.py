"""The global batches of a proof: random tokens under a document map and padding that a layout can get wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from data.batch import Batch, StepBatch, collate
from recipes.config import ProofDocuments, ProveConfig
from recipes.rl.batch import PolicyBatch

PADDED = 16  # a padded row ends in 1/16, 3/16, 5/16 or 7/16 of padding: up to whole shards of it


class Batches:
    """The stream of data rank `rank` of `of`: its rows of every micro-batch, so that the ranks together read what one would.

    horizon = 1 + MTP layers. `position` is the number of steps taken. phase: of sft and what follows some targets count alone,
    and of rl and distill each has what a policy, a judge or a teacher could have said of it.
    """

    def __init__(self, cfg: ProveConfig, vocab_size: int, horizon: int, *, rank: int = 0, of: int = 1, phase: str = "pretrain"):
        self.cfg, self.vocab_size, self.horizon, self.phase = cfg, vocab_size, horizon, phase
        self.rank, self.of = rank, of
        self.position = 0

    def __next__(self) -> StepBatch:
        c = self.cfg
        own = c.batch // self.of
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((c.seed, self.position))))
        tokens = generator.integers(self.vocab_size, size=(c.accumulation * c.batch, c.length + 1))
        said = generator.normal(size=(2, c.accumulation * c.batch, c.length))
        micro_batches = []
        for k in range(c.accumulation):
            rows = range(k * c.batch + self.rank * own, k * c.batch + (self.rank + 1) * own)
            batch = self._batch(tokens[rows.start : rows.stop], rows)
            micro_batches.append(self._in_phase(batch, torch.from_numpy(said[:, rows.start : rows.stop])))
        self.position += 1
        return StepBatch(micro_batches, self.position - 1, c.accumulation * c.batch * c.length)

    def _in_phase(self, batch: Batch, said: Tensor) -> Batch:
        """said [2, B, T]: normal numbers, which decide what counts and what is said of it."""
        if self.phase in ("pretrain", "extend", "draft"):
            return batch
        answers = batch.tokens % 4 > 0  # three quarters of the targets, by what is drawn anyway
        mask = batch.loss_mask & answers
        if self.phase == "sft":
            return replace(batch, loss_mask=mask)
        # an untrained model gives every token about the same probability: ratios lie around 1, some of them outside the clip
        behaviour = -math.log(self.vocab_size) + 0.3 * said[0]
        with_teacher = {"teacher": -math.log(self.vocab_size) + said[1], "baseline": 0.3 * said.sum(0)}
        more = with_teacher if self.phase == "distill" else {"advantage": said[1].clone()}
        fields = {name: getattr(batch, name) for name in ("tokens", "labels", "document_starts", "padding")}
        return PolicyBatch(**fields, loss_mask=mask[:1], behaviour=behaviour, fresh=answers, times=1.0 + batch.tokens % 3, **more)

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
