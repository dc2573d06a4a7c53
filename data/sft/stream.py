"""The endless, resumable stream of fine-tuning batches, and the fixed held-out batches.

In each epoch all conversations are shuffled and packed best-fit into rows of T + 1 tokens, every one whole and at its row's own
place in the document map. Row i over all epochs is a pure function of the seed; step s reads the global rows `samples_of(s)`, and
ranks only decide who reads which: a step is all there is to resume from.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import numpy as np

from data.batch import Batch, StepBatch, collate
from data.config import DataConfig, TooLong, micro_batch, samples_of, validate
from data.errors import DataError
from data.sft.packing import epoch_rows, pack
from data.sft.prepare import Conversations, PreparedChat
from data.stream import shuffled

log = logging.getLogger(__name__)


def chat_stream(
    cfg: DataConfig, prepared: PreparedChat, *, rank: int = 0, of: int = 1, position: int = 0, horizon: int = 1
) -> ChatStream:
    """The training batches of data rank `rank` of `of`, from step `position` on; horizon = 1 + MTP layers.

    Raises DataError if the batch does not divide over the ranks, or if no conversation fits a row.
    """
    validate(cfg, of=of)
    if not 0 <= rank < of or position < 0 or horizon < 1:
        raise DataError(
            f"chat_stream(rank={rank}, of={of}, position={position}, horizon={horizon}): "
            "needs 0 <= rank < of, position >= 0 and horizon >= 1"
        )
    return ChatStream(cfg, Rows(cfg, prepared), rank, of, position, horizon)


def chat_heldout(cfg: DataConfig, prepared: PreparedChat, horizon: int = 1) -> list[Batch]:
    """Whole held-out conversations with at least `cfg.heldout_tokens` targets, or all there are (a log line says so).

    Which conversations they are depends on neither the seed nor the batch; `cfg.micro_batch_size` only groups the rows.
    """
    validate(cfg)
    split = prepared.conversations("heldout")
    fits = _fitting(cfg, prepared, split, "heldout")
    targets = np.array([int(split.part(i, cfg.seq_length + 1)[1].sum()) for i in fits])
    order = shuffled(len(fits), 0)
    enough = int(np.searchsorted(np.cumsum(targets[order]), cfg.heldout_tokens)) + 1
    if enough > len(order):
        have = int(targets.sum())
        log.warning("data.heldout_tokens=%d: the held-out conversations have %d targets; all are used", cfg.heldout_tokens, have)
    chosen = fits[np.sort(order[:enough])]
    rows = pack(np.minimum(split.lengths[chosen], cfg.seq_length + 1), cfg.seq_length + 1)
    size = micro_batch(cfg)
    return [
        _batch([chosen[row] for row in rows[i : i + size]], split, cfg.seq_length, prepared.eos, horizon)
        for i in range(0, len(rows), size)
    ]


class ChatStream(Iterator[StepBatch]):
    """Yields one StepBatch a step, for ever. `position` is the number of steps consumed: all there is to resume from."""

    def __init__(self, cfg: DataConfig, rows: Rows, rank: int, of: int, position: int, horizon: int):
        self.position = position
        self._cfg, self._rows = cfg, rows
        self._rank, self._of, self._horizon = rank, of, horizon
        self._micro = micro_batch(cfg, of)

    @property
    def epoch(self) -> float:
        """How often the training conversations have been read, fractions included."""
        epoch, row, of = self._rows.place(samples_of(self._cfg, self.position).start)
        return epoch + row / of

    def __next__(self) -> StepBatch:
        index, samples = self.position, samples_of(self._cfg, self.position)
        group = self._micro * self._of
        micro_batches = [self._read(first + self._rank * self._micro) for first in samples[::group]]
        self.position += 1
        return StepBatch(micro_batches, index, len(samples) * self._cfg.seq_length)

    def _read(self, first: int) -> Batch:
        rows = [self._rows[i] for i in range(first, first + self._micro)]
        return _batch(rows, self._rows.split, self._cfg.seq_length, self._rows.eos, self._horizon)


class Rows:
    """Row number i (from 0, over all epochs): the conversations in it, as indices into `split`."""

    def __init__(self, cfg: DataConfig, prepared: PreparedChat):
        self.split, self.eos = prepared.conversations("train"), prepared.eos
        self._fits = _fitting(cfg, prepared, self.split, "train")
        self._room, self._seed = cfg.seq_length + 1, cfg.seed
        self._lengths = np.minimum(self.split.lengths[self._fits], self._room)
        self._ends: list[int] = []  # rows up to the end of each epoch so far: how many there are in one depends on its order
        self._packed: dict[int, list[np.ndarray]] = {}

    def place(self, index: int) -> tuple[int, int, int]:
        """(epoch, row in it, rows in it) of row `index`."""
        while not self._ends or self._ends[-1] <= index:
            self._ends.append((self._ends[-1] if self._ends else 0) + len(self._epoch(len(self._ends))))
        epoch = int(np.searchsorted(self._ends, index, side="right"))
        first = self._ends[epoch - 1] if epoch else 0
        return epoch, index - first, self._ends[epoch] - first

    def __getitem__(self, index: int) -> np.ndarray:
        epoch, row, _ = self.place(index)
        return self._fits[self._epoch(epoch)[row]]

    def _epoch(self, epoch: int) -> list[np.ndarray]:
        if epoch not in self._packed:
            for old in sorted(self._packed)[:-1]:  # a step reads from two epochs at their border: keep the newest other one
                del self._packed[old]
            self._packed[epoch] = epoch_rows(self._lengths, self._room, self._seed, epoch)
        return self._packed[epoch]


def _fitting(cfg: DataConfig, prepared: PreparedChat, split: Conversations, name: str) -> np.ndarray:
    """Indices of the conversations that are read; what becomes of the others is `cfg.chat.too_long`, and said."""
    room, source = cfg.seq_length + 1, prepared.manifest["sources"][name]
    long = split.lengths > room
    keep = ~long
    if count := int(long.sum()):
        what = (
            f"{count} of {len(split)} {name} conversations of {source} are longer than a row of "
            f"data.seq_length + 1 = {room} tokens (the longest: {int(split.lengths.max())})"
        )
        if cfg.chat.too_long is TooLong.refuse:
            raise DataError(f"data.chat.too_long=refuse: {what}; give a longer data.seq_length, or drop or truncate them")
        if cfg.chat.too_long is TooLong.truncate:
            keep[long] = [bool(split.part(int(i), room)[1].any()) for i in np.flatnonzero(long)]
            log.warning(
                "data.chat.too_long=truncate: %s and lose their ends; %d have no target left and are left out",
                what,
                int((~keep).sum()),
            )
        else:
            log.warning("data.chat.too_long=drop: %s and are left out", what)
    if not keep.any():
        raise DataError(
            f"data.seq_length={cfg.seq_length}: no {name} conversation of {source} fits {room} tokens, "
            f"the shortest has {int(split.lengths.min())}"
        )
    return np.flatnonzero(keep)


def _batch(rows: Sequence[np.ndarray], split: Conversations, length: int, fill: int, horizon: int) -> Batch:
    """Rows of conversations as a batch; places behind the last are padding, which is no one's continuation."""
    shape = (len(rows), length + 1)
    ids = np.full(shape, fill, dtype=np.int64)
    starts, filled, counted = (np.zeros(shape, dtype=bool) for _ in range(3))
    for b, row in enumerate(rows):
        first = 0
        for conversation in row:
            tokens, targets = split.part(int(conversation), length + 1)
            stop = first + len(tokens)
            ids[b, first:stop], counted[b, first:stop] = tokens, targets
            starts[b, first] = True
            first = stop
        filled[b, :first] = True
        starts[b, first : first + 1] = True
    return collate(ids, starts, horizon=horizon, filled=filled, counted=counted)
