"""Rows for context extension: long documents whole, and rows in which late tokens can be known from early ones alone (report 3).

Row number i is a pure function of the seed and i, as in data/stream.py, whose Samples give the ordinary rows: so resuming needs
the position alone, and ranks only decide who reads which. What kind row i is of follows a sequence that spreads the kinds evenly,
so that every step has nearly its share of each.

A row of facts is cut into windows of the same size, a power-of-two fraction of it that the row draws. Each window tells its facts
in its first third and asks them in its last third: distances are one to two thirds of a window at least, up to all of it, at
every scale from the row's down to what a model that knew short rows could do. Inside a row nothing marks where documents end.
"""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from data.config import SHORTEST_RECALL, DataConfig
from data.draws import Draws
from data.facts import Fact, Facts, plant
from data.prepare import Prepared
from data.stream import Samples

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

log = logging.getLogger(__name__)

_KIND, _DOCUMENT, _RECALL = 10, 11, 12  # of draws: none shares its key with another, or with the order of documents
_GOLDEN = 11400714819323198485  # 2^64 / golden ratio: multiples of it modulo 2^64 lie evenly
_POOL = 16  # long documents hold at least one part in so many of all tokens
_LINES = 0.5  # of a window that facts and questions take at most
_PIECE = 4  # documents that a window's text comes from, at least


class LongSamples:
    """Sample number i: (tokens [T + 1], document starts [T + 1]), like data.stream's Samples."""

    def __init__(self, prepared: Prepared, cfg: DataConfig):
        dataset = prepared.dataset("train")
        self.ordinary = Samples(dataset, cfg.seq_length, cfg.seed)
        self.tokens = self.ordinary.tokens
        self._cfg, self._seed, self._length = cfg.long, cfg.seed, cfg.seq_length
        self._offset = Draws(cfg.seed, _KIND).below(1 << 64)
        self.text = Text(dataset, prepared.eos)
        self._facts = Facts(prepared.tokenizer()) if cfg.long.recall else None
        if cfg.long.documents:
            self._pool, self.whole = self.text.longest(cfg.seq_length + 1)
            log.info(
                "data.long: %d documents fill a row of %d tokens; %s", self.whole, cfg.seq_length,
                "rows begin in them alone" if self.whole == len(self._pool) else "others are joined with their neighbours",
            )  # fmt: skip

    def __len__(self) -> int:
        """Rows in which as many tokens are read as there are."""
        return len(self.ordinary)

    def kind(self, index: int) -> str:
        """ "documents", "recall" or "ordinary"."""
        place = (index * _GOLDEN + self._offset) % (1 << 64) / (1 << 64)
        if place < self._cfg.documents:
            return "documents"
        return "recall" if place < self._cfg.documents + self._cfg.recall else "ordinary"

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        kind = self.kind(index)
        if kind == "ordinary":
            return self.ordinary[index]
        tokens = self._document(index) if kind == "documents" else self._recall(index)
        return tokens, np.arange(len(tokens)) == 0

    def _document(self, index: int) -> np.ndarray:
        draws, need = Draws(self._seed, _DOCUMENT, index), self._length + 1
        document = self._pool[draws.below(len(self._pool))]
        spare = int(self.text.lengths[document]) - need
        return self.text.run(document, draws.below(spare + 1) if spare > 0 else 0, need)

    def _recall(self, index: int) -> np.ndarray:
        assert self._facts is not None
        draws, need = Draws(self._seed, _RECALL, index), self._length + 1
        scales = max(1, (need // SHORTEST_RECALL).bit_length())
        count = 1 << draws.below(scales)
        edges = [need * i // count for i in range(count + 1)]
        return np.concatenate(
            [
                window(draws, self.text, self._facts, self._cfg.facts, end - first, self._cfg.questions)[0]
                for first, end in pairwise(edges)
            ]
        )


class Text:
    """All tokens of a split as text to cut from: documents in the order of their names, ends of text left out."""

    def __init__(self, dataset: IndexedDataset, eos: int):
        self._dataset, self._eos = dataset, eos
        self.lengths = dataset.sequence_lengths.astype(np.int64)

    def longest(self, need: int) -> tuple[np.ndarray, int]:
        """(documents that rows of `need` tokens may begin in, longest first; how many of them fill one).

        All that fill a row, and so many of the next ones that together they hold a fair part of the text.
        """
        order = np.argsort(-self.lengths, kind="stable")
        sizes = self.lengths[order]
        whole = int((sizes >= need).sum())
        fair = int(np.searchsorted(np.cumsum(sizes), sizes.sum() / _POOL)) + 1
        return order[: max(whole, fair)], whole

    def run(self, document: int, offset: int, need: int) -> np.ndarray:
        """`need` tokens from `offset` of a document on, going on in the next ones and after the last in the first."""
        pieces: list[np.ndarray] = []
        while need > 0:
            piece = self._dataset.get(int(document), offset, min(need, int(self.lengths[document]) - offset))
            if len(piece) < need:  # the text goes on
                piece = piece[piece != self._eos]
            pieces.append(piece)
            need -= len(piece)
            document, offset = (int(document) + 1) % len(self.lengths), 0
        return np.concatenate(pieces)

    def scraps(self, draws: Draws, need: int, most: int) -> np.ndarray:
        """`need` tokens in pieces of at most `most`, each from somewhere in a document of its own."""
        pieces: list[np.ndarray] = []
        while need > 0:
            document = draws.below(len(self.lengths))
            length = int(self.lengths[document])
            offset = draws.below(max(1, length - most))
            piece = self._dataset.get(document, offset, min(most, need, length - offset))
            piece = piece[piece != self._eos]
            pieces.append(piece)
            need -= len(piece)
        return np.concatenate(pieces)


def window(
    draws: Draws, text: Text, facts: Facts, most: int, size: int, questions: int, *, heldout: bool = False, edge: float = 1 / 3
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [size], bool [size]: answers to questions): at most `most` facts, told in the first `edge` of the text and asked in
    the last, each `questions` times.
    """
    chosen: list[Fact] = []
    room = int(_LINES * size)
    for fact in facts.draw(draws, min(most, len(facts.words)), heldout=heldout):
        room -= (1 + questions) * len(fact.line)
        if room < 0 and chosen:
            break
        chosen.append(fact)
    left = size - sum((1 + questions) * len(fact.line) for fact in chosen)
    filler = text.scraps(draws, left, -(-left // _PIECE))
    early = int(left * edge)
    told_at = [draws.below(early + 1) for _ in chosen]
    asked = [chosen[int(i)] for _ in range(questions) for i in draws.order(len(chosen))]
    return plant(filler, chosen, told_at, asked, [left - draws.below(early + 1) for _ in asked])
