"""One evaluation set: exactly the size asked for, from every file, the same targets however they are batched."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from data import heldout
from data.heldout import _choose, _shares
from data.prepare import token_array


def rows(batches) -> dict[str, torch.Tensor]:
    return {n: torch.cat([getattr(b, n) for b in batches]) for n in ("tokens", "labels", "document_starts")} | {
        "mask": torch.cat([b.loss_mask for b in batches], dim=1)
    }


def counted(batches) -> list[tuple[int, int]]:
    r = rows(batches)
    return list(zip(r["tokens"][r["mask"][0]].tolist(), r["labels"][r["mask"][0]].tolist()))


@pytest.mark.parametrize("tokens", [1, 31, 500, 1000, 1283])
@pytest.mark.parametrize("length", [1, 16, 33])
def test_exactly_as_many_targets_as_asked_for(tokens, length, cfg, prepared):
    batches = heldout(replace(cfg, heldout_tokens=tokens, seq_length=length), prepared)
    assert sum(int(b.loss_mask[0].sum()) for b in batches) == tokens


def test_the_targets_depend_on_neither_batch_nor_length_nor_seed(cfg, prepared):
    expected = counted(heldout(cfg, prepared))
    for change in ({"seq_length": 5}, {"seq_length": 999}, {"micro_batch_size": 3, "batch_size": 3}, {"seed": 4}):
        assert counted(heldout(replace(cfg, **change), prepared)) == expected
    few, many = (rows(heldout(replace(cfg, micro_batch_size=m), prepared)) for m in (1, 12))
    assert all(torch.equal(few[n], many[n]) for n in few)


def test_every_document_gives_one_excerpt_in_proportion(cfg, prepared):
    tokens, lengths = token_array(prepared, "heldout")
    batches = heldout(replace(cfg, seq_length=5000, micro_batch_size=1, batch_size=1), prepared)
    (batch,) = batches
    starts = batch.document_starts[0].nonzero().squeeze(1).tolist()
    ends = [*starts[1:], 5000]
    assert batch.padding is not None and starts[-1] == int(batch.padding.long().argmax())  # the padding is the last segment
    assert len(starts) == len(lengths) + 1
    firsts, inner = np.cumsum(lengths) - lengths, 0
    for i, (first, end) in enumerate(zip(starts[:-1], ends)):
        excerpt = batch.tokens[0, first:end].numpy()
        document = tokens[firsts[i] : firsts[i] + lengths[i]]
        places = [j for j in range(len(document) - len(excerpt) + 1) if np.array_equal(excerpt, document[j : j + len(excerpt)])]
        assert places
        inner += 0 not in places
        assert abs((len(excerpt) - 1) - 1000 * (lengths[i] - 1) / (lengths - 1).sum()) < 2
    assert inner > len(lengths) / 2  # not the beginnings alone: those are licences and imports in a library


def test_masks_with_mtp_and_padding(cfg, prepared):
    for b in heldout(cfg, prepared, horizon=3):
        for row in range(len(b.tokens)):
            begins = [*b.document_starts[row].tolist()]
            pads = [False] * cfg.seq_length if b.padding is None else b.padding[row].tolist()
            assert not b.loss_mask[:, row][:, torch.tensor(pads)].any()
            for t in range(cfg.seq_length - 3):
                for m in range(3):
                    same = not any(begins[t + 1 : t + m + 2]) and not pads[t + m + 1] and not pads[t]
                    assert bool(b.loss_mask[m, row, t]) == same


def test_too_few_held_out_tokens_are_all_used_and_said_so(cfg, prepared, caplog):
    _, lengths = token_array(prepared, "heldout")
    with caplog.at_level(logging.WARNING):
        batches = heldout(replace(cfg, heldout_tokens=10**6), prepared)
    have = int((lengths - 1).sum())
    assert sum(int(b.loss_mask[0].sum()) for b in batches) == have
    assert f"only {have}" in caplog.text and "data.heldout_tokens=1000000" in caplog.text


@pytest.mark.parametrize("seed", range(20))
def test_shares_sum_exactly(seed):
    rng = np.random.default_rng(seed)
    targets = rng.integers(1, rng.integers(2, 10_000), size=rng.integers(1, 500))
    for want in {1, 40, int(targets.sum()) // 2 or 1, int(targets.sum())}:
        want = min(want, int(targets.sum()))
        chosen = _choose(targets, want)
        shares = _shares(targets[chosen], want)
        assert shares.sum() == want and (shares >= 1).all() and (shares <= targets[chosen]).all()
        assert len(chosen) <= len(targets) and (np.diff(chosen) > 0).all()
