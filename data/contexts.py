"""The same held-out targets in rows of several lengths: what a longer context is worth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data.batch import Batch, collate
from data.config import DataConfig
from data.errors import DataError
from data.long import Text
from data.prepare import Prepared

_TOKENS = 16384  # of a batch, where a row has no more


def contexts(cfg: DataConfig, prepared: Prepared, lengths: Sequence[int]) -> dict[int, list[Batch]]:
    """length -> batches of all the same targets: excerpts of the longest held-out documents, cut into rows of that length, each
    with a fresh context.

    Excerpts have as many tokens as the longest length and are `cfg.heldout_tokens` together, one at least; where a document is
    shorter its neighbours follow in the same row. Raises DataError for a length that does not divide the longest one.
    """
    longest = max(lengths)
    for length in lengths:
        if length < 1 or longest % length:
            raise DataError(f"contexts: length {length} must divide the longest, {longest}: rows are cut from the same excerpts")
    text = Text(prepared.dataset("heldout"), prepared.eos)
    wanted = max(1, min(cfg.heldout_tokens, int(text.lengths.sum())) // longest)
    places, _ = text.longest(1)
    excerpts: list[np.ndarray] = []
    for lap in range(wanted):  # the first stretch of every long document, then their second, ...
        for document in places:
            offset = lap * longest
            if len(excerpts) < wanted and (not lap or offset + longest < text.lengths[document]):
                excerpts.append(text.run(document, offset, longest + 1))
        if len(excerpts) >= wanted:
            break
    return {length: _rows(np.stack(excerpts), length) for length in lengths}


def _rows(excerpts: np.ndarray, length: int) -> list[Batch]:
    firsts = np.arange(0, excerpts.shape[1] - 1, length)
    rows = excerpts[:, firsts[:, None] + np.arange(length + 1)].reshape(-1, length + 1)
    size = max(1, _TOKENS // length)
    return [collate(r, np.zeros(r.shape, dtype=bool), horizon=1) for r in (rows[i : i + size] for i in range(0, len(rows), size))]
