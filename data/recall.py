"""Questions whose answers stand far back: the evaluation of long-range recall, for rows of several lengths.

The facts and the text around them are held out: no row that data/long.py makes shares a fact with one here. A row has the same
number of facts whatever its length, told in its first quarter and asked in its last, so that length alone makes the difference:
the way from a question to its answer is half the row at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from data.batch import Batch, collate
from data.config import SHORTEST_RECALL, DataConfig
from data.draws import Draws
from data.errors import DataError
from data.facts import Facts
from data.long import Text, window
from data.prepare import Prepared

_KEY = 13  # of draws
_TOKENS = 16384  # of a batch, where a row has no more


def recall(
    cfg: DataConfig, prepared: Prepared, lengths: Sequence[int], *, rows: int = 16, facts: int = 6
) -> dict[int, list[Batch]]:
    """length -> batches of `rows` rows in all, of which the answers' tokens alone are counted (`loss_mask` [1, B, T]).

    The same rows whatever `cfg.seed`, batch and `cfg.seq_length`. Raises DataError for a length without room for the facts.
    """
    text, words = Text(prepared.dataset("heldout"), prepared.eos), Facts(prepared.tokenizer())
    out: dict[int, list[Batch]] = {}
    for length in lengths:
        if length < SHORTEST_RECALL:
            raise DataError(f"recall at length {length}: has no room for facts; give {SHORTEST_RECALL} tokens or more")
        draws = [Draws(_KEY, length, row) for row in range(rows)]
        made = [window(d, text, words, facts, length + 1, 1, heldout=True, edge=0.25) for d in draws]
        size = max(1, _TOKENS // length)
        out[length] = [_batch(made[first : first + size]) for first in range(0, rows, size)]
    return out


def _batch(rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> Batch:
    tokens, answers = (np.stack(column) for column in zip(*rows))
    import torch

    batch = collate(tokens, np.zeros(tokens.shape, dtype=bool), horizon=1)
    return replace(batch, loss_mask=batch.loss_mask & torch.from_numpy(answers[None, :, 1:]))
