"""The order of the data is one and the same however many ranks read it, and wherever reading stops and goes on."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch

from data import Batch, DataError, stream
from data.prepare import token_array
from data.stream import Samples, shuffled


def equal(a: Batch, b: Batch) -> bool:
    names = ("tokens", "labels", "document_starts", "loss_mask")
    return all(torch.equal(getattr(a, n), getattr(b, n)) for n in names) and a.padding is b.padding is None


def joined(batches: list[Batch]) -> Batch:
    return Batch(
        *(torch.cat([getattr(b, n) for b in batches]) for n in ("tokens", "labels", "document_starts")),
        torch.cat([b.loss_mask for b in batches], dim=1),
    )


def steps_per_epoch(cfg, prepared) -> float:
    return (prepared.count("train") - 1) // cfg.seq_length / cfg.batch_size


@pytest.mark.parametrize(("of", "micro"), [(1, 1), (1, 12), (2, 2), (2, 6), (3, 4), (3, 2), (6, 1), (12, 1)])
def test_the_union_of_ranks_is_the_one_stream(of, micro, cfg, prepared):
    steps = int(steps_per_epoch(cfg, prepared)) + 3  # over the border of an epoch
    alone = stream(replace(cfg, micro_batch_size=1), prepared, horizon=2)
    ranks = [stream(replace(cfg, micro_batch_size=micro), prepared, rank=r, of=of, horizon=2) for r in range(of)]
    for index in range(steps):
        shares = [next(r) for r in ranks]
        expected = next(alone)
        assert {s.index for s in shares} == {index} == {expected.index}
        assert {s.tokens for s in shares} == {cfg.batch_size * cfg.seq_length} == {expected.tokens}
        groups = zip(*(s.micro_batches for s in shares))  # micro batch by micro batch, rank by rank
        assert equal(joined([b for group in groups for b in group]), joined(expected.micro_batches))
        assert all(b.tokens.shape == (micro, cfg.seq_length) for s in shares for b in s.micro_batches)


def test_a_step_reads_the_next_samples(cfg, prepared):
    samples = Samples(prepared.dataset("train"), cfg.seq_length, cfg.seed)
    for step in islice(stream(cfg, prepared), int(steps_per_epoch(cfg, prepared)) + 3):
        read = joined(step.micro_batches)
        for row in range(cfg.batch_size):
            line, _ = samples[step.index * cfg.batch_size + row]
            assert read.tokens[row].tolist() == line[:-1].tolist() and read.labels[row].tolist() == line[1:].tolist()


@pytest.mark.parametrize("at", [1, 7, 60])
def test_resuming_at_a_position_is_going_on(at, cfg, prepared):
    running = stream(cfg, prepared, rank=1, of=2)
    for _ in range(at):
        next(running)
    resumed = stream(cfg, prepared, rank=1, of=2, position=running.position)
    assert running.position == at
    for a, b in islice(zip(running, resumed), 5):
        assert a.index == b.index and all(equal(x, y) for x, y in zip(a.micro_batches, b.micro_batches))


def test_going_back_in_time_gives_the_same_again(cfg, prepared):
    s = stream(cfg, prepared)
    first = next(s)
    for _ in range(3 * int(steps_per_epoch(cfg, prepared))):
        next(s)
    s.position = 0
    assert all(equal(a, b) for a, b in zip(first.micro_batches, next(s).micro_batches))


def test_an_epoch_reads_everything_once_in_its_own_order(cfg, prepared):
    samples = Samples(prepared.dataset("train"), cfg.seq_length, cfg.seed)
    tokens, lengths = token_array(prepared, "train")
    firsts = np.cumsum(lengths) - lengths
    lines = []
    for epoch in range(3):
        order = shuffled(len(lengths), cfg.seed, epoch, 0)
        line = np.concatenate([tokens[firsts[d] : firsts[d] + lengths[d]] for d in order])
        begins = np.concatenate([np.arange(lengths[d]) == 0 for d in order])
        whole = [line[i : i + cfg.seq_length + 1] for i in range(0, len(line) - cfg.seq_length, cfg.seq_length)]
        starts = [begins[i : i + cfg.seq_length + 1] for i in range(0, len(line) - cfg.seq_length, cfg.seq_length)]
        read = [samples[epoch * len(samples) + i] for i in range(len(samples))]
        key = lambda pair: (pair[0].tobytes(), pair[1].tobytes())
        assert sorted(map(key, read)) == sorted(map(key, zip(whole, starts))) and len(read) == len(whole)
        assert [r[0].tobytes() for r in read] != [w.tobytes() for w in whole]  # samples are shuffled too
        lines.append(line.tobytes())
    assert len(set(lines)) == 3


def test_the_seed_sets_the_order(cfg, prepared):
    first, second = (next(stream(replace(cfg, seed=s), prepared)).micro_batches[0].tokens for s in (0, 1))
    assert not torch.equal(first, second)


def test_the_order_stays_what_it_is():
    """A library that drew otherwise would silently break every resumed run."""
    assert shuffled(10, 3, 1, 0).tolist() == [5, 8, 9, 6, 3, 7, 0, 1, 2, 4]
    assert sorted(shuffled(1000, 5).tolist()) == list(range(1000))


def test_maps_and_masks_say_what_the_tokens_say(cfg, prepared):
    horizon, length = 3, cfg.seq_length
    for step in islice(stream(cfg, prepared, horizon=horizon), 20):
        for b in step.micro_batches:
            assert torch.equal(b.tokens[:, 1:], b.labels[:, :-1])
            for row in range(len(b.tokens)):
                line = [*b.tokens[row].tolist(), int(b.labels[row, -1])]
                for t in range(length):
                    assert bool(b.document_starts[row, t]) == (t == 0 or line[t - 1] == prepared.eos)
                    for m in range(horizon):  # the target m + 1 ahead: in this row, and no end of text on the way to it
                        inside = t + m + 1 <= length and prepared.eos not in line[t : t + m + 1]
                        assert bool(b.loss_mask[m, row, t]) == inside


def test_masks_of_a_single_document_lose_only_what_the_row_does_not_know(cfg, prepared):
    samples = [s for step in islice(stream(cfg, prepared, horizon=3), 20) for s in step.micro_batches]
    whole = [(b, r) for b in samples for r in range(len(b.tokens)) if b.document_starts[r].sum() == 1 and b.loss_mask[0, r].all()]
    assert whole
    for b, row in whole:
        assert b.loss_mask[:, row].sum(1).tolist() == [cfg.seq_length, cfg.seq_length - 1, cfg.seq_length - 2]


def test_types_and_memory(cfg, prepared):
    b = next(stream(cfg, prepared)).micro_batches[0]
    assert (b.tokens.dtype, b.labels.dtype, b.document_starts.dtype, b.loss_mask.dtype) == (torch.int64,) * 2 + (torch.bool,) * 2
    assert b.loss_mask.shape == (1, 2, cfg.seq_length) and all(t.is_contiguous() for t in (b.tokens, b.labels, b.document_starts))
    moved = b.to("meta")
    assert moved.tokens.device.type == "meta" and moved.padding is None


def test_batches_that_do_not_divide_are_refused(cfg, prepared):
    with pytest.raises(DataError, match=r"data\.batch_size=12: .*data\.micro_batch_size.*2 x 4 = 8; give 16"):
        stream(cfg, prepared, of=4)
    with pytest.raises(DataError, match="rank=2, of=2"):
        stream(cfg, prepared, rank=2, of=2)


def test_too_little_text_is_refused_with_its_numbers(cfg, prepared):
    have = prepared.count("train")
    with pytest.raises(DataError, match=rf"data\.seq_length={have}: .*only {have} tokens.*{have + 1}"):
        stream(replace(cfg, seq_length=have), prepared)
    assert next(stream(replace(cfg, seq_length=have - 1, batch_size=2), prepared)).micro_batches[0].tokens.shape == (2, have - 1)
