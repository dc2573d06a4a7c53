"""Best-fit packing: whole conversations into rows, so that few places stay empty."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from data.stream import shuffled

WINDOW = 4096  # conversations that are packed together: enough to fill rows well, few enough that an epoch stays shuffled


def pack(lengths: np.ndarray, room: int) -> list[list[int]]:
    """Rows of indices whose `lengths` sum to at most `room` each: the longest first, each into the fullest row that has room.

    Every length must be at most `room`.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (places left, row), sorted
    for i in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[i])
        at = bisect_left(free, (length, -1))
        if at == len(free):
            left, row = room, len(rows)
            rows.append([])
        else:
            left, row = free.pop(at)
        rows[row].append(i)
        if left > length:
            insort(free, (left - length, row))
    return rows


def epoch_rows(lengths: np.ndarray, room: int, seed: int, epoch: int) -> list[np.ndarray]:
    """All conversations of an epoch in rows: shuffled, packed window by window, the rows of all windows shuffled.

    A pure function of its arguments.
    """
    order = shuffled(len(lengths), seed, epoch, 0)
    rows: list[np.ndarray] = []
    for first in range(0, len(order), WINDOW):
        window = order[first : first + WINDOW]
        rows += [window[row] for row in pack(lengths[window], room)]
    return [rows[i] for i in shuffled(len(rows), seed, epoch, 1)]
