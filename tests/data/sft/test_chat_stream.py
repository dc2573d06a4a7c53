"""Packed rows hold whole conversations, targets are the assistant's, and the order is one however many ranks read it."""

import logging
from collections import Counter
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch

from data import DataError
from data.chat import ChatMode, normal, parse
from data.config import ChatConfig, TooLong
from data.sft import chat_heldout, chat_stream
from data.sft.packing import WINDOW, epoch_rows, pack
from data.sft.stream import Rows
from tests.data.test_stream import joined

NAMES = ("tokens", "labels", "document_starts", "loss_mask", "padding")


def equal(a, b) -> bool:
    return all((x is None and y is None) or torch.equal(x, y) for x, y in ((getattr(a, n), getattr(b, n)) for n in NAMES))


def rows_per_epoch(cfg, prepared) -> int:
    return Rows(cfg, prepared).place(0)[2]


def test_rows_are_whole_conversations_with_their_targets(cfg, prepared):
    split, horizon, tokenizer = prepared.conversations("train"), 3, prepared.tokenizer()
    known = {bytes(np.asarray(split.part(i, 10**9)[0])): i for i in range(len(split))}
    seen = Counter()
    stream = chat_stream(cfg, prepared, horizon=horizon)
    while stream.epoch < 1:
        for b in next(stream).micro_batches:
            for row in range(len(b.tokens)):
                line = [*b.tokens[row].tolist(), int(b.labels[row, -1])]
                empty = torch.zeros(len(line) - 1, dtype=torch.bool) if b.padding is None else b.padding[row]
                bounds = torch.nonzero(b.document_starts[row]).flatten().tolist()
                full = len(line) if not empty.any() else int(torch.nonzero(empty)[0])
                assert not empty[:full].any() and empty[full:].all()
                mask = torch.zeros(horizon, len(line) - 1, dtype=torch.bool)
                for first, stop in zip(bounds, [*bounds[1:], len(line)]):
                    if first >= full:
                        break
                    ids = line[first:stop]
                    if bytes(np.array(ids, np.int32)) not in known and stop == len(line):
                        ids = ids[:-1]  # the row's last place is empty
                    index = known[bytes(np.array(ids, np.int32))]
                    seen[index] += 1
                    targets = split.part(index, 10**9)[1]
                    for t in range(len(ids)):
                        for m in range(horizon):
                            if t + m + 1 < len(ids):
                                mask[m, first + t] = bool(targets[t + m + 1])
                assert torch.equal(b.loss_mask[:, row], mask)
    # all once, and some once more that the last step read of the next epoch
    assert set(seen) == set(range(len(split))) and max(seen.values()) <= 2
    conversation = parse(split.part(0, 10**9)[0], tokenizer, mode=ChatMode.thinking)
    assert conversation == normal(conversation, ChatMode.thinking)


@pytest.mark.parametrize(("of", "micro"), [(1, 12), (2, 2), (3, 4), (6, 1)])
def test_the_union_of_ranks_is_the_one_stream(of, micro, cfg, prepared):
    steps = rows_per_epoch(cfg, prepared) // cfg.batch_size + 3  # over the border of an epoch
    alone = chat_stream(replace(cfg, micro_batch_size=1), prepared, horizon=2)
    ranks = [chat_stream(replace(cfg, micro_batch_size=micro), prepared, rank=r, of=of, horizon=2) for r in range(of)]
    for index in range(steps):
        shares, expected = [next(r) for r in ranks], next(alone)
        assert {s.index for s in shares} == {index} and {s.tokens for s in shares} == {cfg.batch_size * cfg.seq_length}
        groups = zip(*(s.micro_batches for s in shares))
        assert equal(joined([b for group in groups for b in group]), joined(expected.micro_batches))


@pytest.mark.parametrize("at", [1, 5, 14])
def test_resuming_at_a_position_is_going_on(at, cfg, prepared):
    running = chat_stream(cfg, prepared, rank=1, of=2, horizon=2)
    for _ in range(at):
        next(running)
    resumed = chat_stream(cfg, prepared, rank=1, of=2, position=at, horizon=2)
    assert running.position == at and running.epoch == resumed.epoch
    for a, b in islice(zip(running, resumed), 5):
        assert a.index == b.index and all(equal(x, y) for x, y in zip(a.micro_batches, b.micro_batches))
    running.position = 0
    assert equal(next(running).micro_batches[0], next(chat_stream(cfg, prepared, rank=1, of=2, horizon=2)).micro_batches[0])


def test_epochs_have_their_own_order_and_the_seed_sets_it():
    lengths = np.random.default_rng(0).integers(5, 90, size=500)
    first, again, second, other = (epoch_rows(lengths, 100, *key) for key in ((0, 0), (0, 0), (0, 1), (1, 0)))
    flat = lambda rows: np.concatenate(rows).tolist()
    assert flat(first) == flat(again) and len({tuple(flat(r)) for r in (first, second, other)}) == 3
    for rows in first, second, other:
        assert sorted(flat(rows)) == list(range(500)) and all(lengths[row].sum() <= 100 for row in rows)


def test_packing_takes_the_fullest_row_with_room():
    assert pack(np.array([5, 7, 3, 2, 10, 1]), 10) == [[4], [1, 2], [0, 3, 5]]


@pytest.mark.parametrize("room", [2049, 8193])
def test_packing_wastes_little_on_a_real_mix_of_lengths(room):
    rng = np.random.default_rng(0)
    lengths = np.minimum(room, np.concatenate([rng.lognormal(6, 1, 9000), rng.lognormal(7.5, 0.7, 3000)]).astype(int) + 20)
    assert len(lengths) > 2 * WINDOW
    assert lengths.sum() / (len(epoch_rows(lengths, room, 0, 0)) * room) > 0.98


def test_long_conversations_are_counted_and_dropped_truncated_or_refused(cfg, prepared, caplog):
    short = replace(cfg, seq_length=127)
    long = int((prepared.conversations("train").lengths > 128).sum())
    total = len(prepared.conversations("train"))
    assert 0 < long < total
    with caplog.at_level(logging.WARNING):
        dropped = Rows(short, prepared)
        assert f"drop: {long} of {total} train conversations" in caplog.text
    truncated = Rows(replace(short, chat=ChatConfig(too_long=TooLong.truncate)), prepared)
    assert len(dropped._fits) == total - long < len(truncated._fits) and "lose their ends" in caplog.text
    with pytest.raises(DataError, match=rf"too_long=refuse: {long} of {total}.*data\.seq_length \+ 1 = 128"):
        Rows(replace(short, chat=ChatConfig(too_long=TooLong.refuse)), prepared)
    with pytest.raises(DataError, match=r"data\.seq_length=8: no train conversation.*shortest has"):
        chat_stream(replace(cfg, seq_length=8), prepared)


def test_held_out_batches_are_fixed(cfg, prepared):
    a, b = (chat_heldout(replace(cfg, seed=s, micro_batch_size=m), prepared, horizon=2) for s, m in ((0, 2), (5, 4)))
    assert sum(int(x.loss_mask[0].sum()) for x in a) == sum(int(x.loss_mask[0].sum()) for x in b) >= cfg.heldout_tokens
    assert torch.equal(torch.cat([x.tokens for x in a]), torch.cat([x.tokens for x in b]))
    every = chat_heldout(replace(cfg, heldout_tokens=10**9), prepared)
    assert sum(int(x.loss_mask[0].sum()) for x in every) == prepared.manifest["heldout"]["targets"]


def test_batches_that_do_not_divide_are_refused(cfg, prepared):
    with pytest.raises(DataError, match=r"data\.batch_size=12"):
        chat_stream(cfg, prepared, of=4)
    with pytest.raises(DataError, match="rank=2, of=2"):
        chat_stream(cfg, prepared, rank=2, of=2)
