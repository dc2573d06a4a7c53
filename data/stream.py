"""The endless, resumable stream of training batches.

The order is a pure function of the seed, the epoch and the sample's number. In each epoch all documents are shuffled and laid
end to end; the line is cut every T tokens into samples of T + 1 (neighbours share one token, so every token but the first is a
target once); the samples are shuffled. What is left over at the end of an epoch, under T tokens, is not read in it. Step s
consists of the global samples [s G, (s + 1) G), G = data.batch_size, or under data.ramp of the next samples after step s - 1;
ranks only decide who reads which. Under data.long some rows are others: see data/long.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import numpy as np

from data.batch import Batch, StepBatch, collate
from data.config import DataConfig, micro_batch, samples_of, validate
from data.errors import DataError
from data.prepare import Prepared

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDataset


def stream(cfg: DataConfig, prepared: Prepared, *, rank: int = 0, of: int = 1, position: int = 0, horizon: int = 1) -> Stream:
    """The training batches of data rank `rank` of `of`, from step `position` on; horizon = 1 + MTP layers.

    Raises DataError if the batch does not divide over the ranks or the training split is shorter than one sample.
    """
    validate(cfg, of=of)
    if not 0 <= rank < of or position < 0 or horizon < 1:
        raise DataError(
            f"stream(rank={rank}, of={of}, position={position}, horizon={horizon}): "
            "needs 0 <= rank < of, position >= 0 and horizon >= 1"
        )
    samples: Rows = Samples(prepared.dataset("train"), cfg.seq_length, cfg.seed)
    if cfg.long.documents or cfg.long.recall:
        from data.long import LongSamples  # which reads this module

        samples = LongSamples(prepared, cfg)
    if not len(samples):
        raise DataError(
            f"data.seq_length={cfg.seq_length}: the training split of data.corpus={prepared.manifest['corpus']} has only "
            f"{samples.tokens} tokens, and one sequence needs {cfg.seq_length + 1}; give more text or a shorter sequence"
        )
    return Stream(cfg, samples, rank, of, position, horizon)


class Rows(Protocol):
    """Numbered rows: what a stream reads. `len` is how many of them are an epoch."""

    tokens: int  # of the split

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]: ...


class Stream(Iterator[StepBatch]):
    """Yields one StepBatch a step, for ever. `position` is the number of steps consumed: all there is to resume from."""

    def __init__(self, cfg: DataConfig, samples: Rows, rank: int, of: int, position: int, horizon: int):
        self.position = position
        self._samples = samples
        self._rank, self._of, self._horizon = rank, of, horizon
        self._cfg, self._micro, self._length = cfg, micro_batch(cfg, of), cfg.seq_length

    @property
    def epoch(self) -> float:
        """How often the training split has been read, fractions included."""
        return samples_of(self._cfg, self.position).start / len(self._samples)

    def __next__(self) -> StepBatch:
        index, samples = self.position, samples_of(self._cfg, self.position)
        group = self._micro * self._of
        micro_batches = [self._read(first + self._rank * self._micro) for first in samples[::group]]
        self.position += 1
        return StepBatch(micro_batches, index, len(samples) * self._length)

    def _read(self, first: int) -> Batch:
        rows, starts = zip(*(self._samples[i] for i in range(first, first + self._micro)))
        return collate(np.stack(rows), np.stack(starts), horizon=self._horizon)


class Samples:
    """Sample number i (from 0, over all epochs) of a split: (tokens [T + 1], document starts [T + 1])."""

    def __init__(self, dataset: IndexedDataset, length: int, seed: int):
        self._dataset = dataset
        self._length = length
        self._seed = seed
        self._document_lengths = dataset.sequence_lengths.astype(np.int64)
        self.tokens = int(self._document_lengths.sum())
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def __len__(self) -> int:
        """Samples in one epoch."""
        return max(0, (self.tokens - 1) // self._length)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        epoch, number = divmod(index, len(self))
        documents, ends, samples = self._epoch(epoch)
        here = int(samples[number]) * self._length
        stop = here + self._length + 1
        starts = np.zeros(self._length + 1, dtype=bool)
        pieces, first = [], here
        place = int(np.searchsorted(ends, here, side="right"))  # the document that holds token `here`
        while first < stop:
            document = int(documents[place])
            offset = first - (int(ends[place]) - int(self._document_lengths[document]))
            taken = min(stop, int(ends[place])) - first
            pieces.append(self._dataset.get(document, offset, taken))
            starts[first - here] = offset == 0
            first += taken
            place += 1
        return np.concatenate(pieces), starts

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(documents in order, where each ends on the line, samples in order)."""
        if epoch not in self._epochs:
            documents = shuffled(len(self._document_lengths), self._seed, epoch, 0)
            ends = np.cumsum(self._document_lengths[documents])
            for old in sorted(self._epochs)[:-1]:  # a step reads from two epochs at their border: keep the newest other one
                del self._epochs[old]
            self._epochs[epoch] = (documents, ends, shuffled(len(self), self._seed, epoch, 1))
        return self._epochs[epoch]


def shuffled(n: int, *key: int) -> np.ndarray:
    """The numbers 0 .. n-1 in an order set by `key`. Sorts raw 64-bit draws, which numpy keeps the same in every version."""
    draws = np.random.Philox(np.random.SeedSequence(key)).random_raw(n)
    return np.argsort(draws, kind="stable")
