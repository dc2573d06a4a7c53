"""Recall and held-out loss against length, as every rank is told them; memory against length."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import data
import k3
import parallel
from k3.activations import ActivationConfig
from recipes.bench.length import Cost, _numbers, linear
from recipes.errors import UserError
from recipes.objective import heldout_loss
from recipes.recall import Recalled, _answers, loss_by_length, loss_by_position, picture, recall, table
from tests.data.conftest import write_corpus


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    root = tmp_path_factory.mktemp("recall")
    cfg = data.DataConfig(corpus=str(write_corpus(root / "corpus")), cache=str(root / "cache"), heldout_tokens=1024)
    return cfg, data.prepare(cfg, 300)


@pytest.fixture(scope="module")
def model():
    world = parallel.start()
    config = replace(k3.preset("tiny"), vocab_size=300)
    module = k3.build(config, world, dtype=torch.float64, activations=ActivationConfig(head_chunk=64))
    return parallel.wrap(module, k3.cards(module), world)


def test_recall_is_the_loss_on_answers_alone(prepared, model):
    cfg, made = prepared
    sets = data.recall(cfg, made, [128, 256], rows=4, facts=2)
    found = recall(model, sets)
    assert list(found) == [128, 256]
    for length, batches in sets.items():
        losses, answers = [], []
        for b in batches:
            with torch.no_grad():
                logits = model.module.eval()(b.tokens, b.document_starts)
            losses.append(torch.nn.functional.cross_entropy(logits[b.loss_mask[0]], b.labels[b.loss_mask[0]], reduction="none"))
            hits = logits.argmax(-1) == b.labels
            for row in range(len(hits)):
                whole = None
                for counts, hit in zip(b.loss_mask[0, row].tolist(), hits[row].tolist()):
                    if counts:
                        whole = hit and whole is not False
                    elif whole is not None:
                        answers.append(whole)
                        whole = None
        assert found[length].loss == pytest.approx(torch.cat(losses).mean().item(), rel=1e-12)
        assert found[length].answers == len(answers) >= 4 and sum(len(one) for one in losses) > len(answers)
        assert found[length].found == sum(answers) / len(answers)


def test_an_answer_is_found_if_all_of_its_tokens_are() -> None:
    mask = torch.tensor([[[0, 1, 1, 0, 1, 1], [1, 1, 0, 0, 1, 0]]]).bool()
    hits = torch.tensor([[1, 1, 1, 0, 1, 0], [1, 1, 1, 0, 0, 0]])
    batch = data.Batch(torch.zeros(2, 6), torch.zeros(2, 6), torch.zeros(2, 6, dtype=torch.bool), mask)
    scores = torch.stack([torch.arange(12.0).view(2, 6), hits.float()])
    assert _answers(batch, scores).tolist() == [1 + 2 + 4 + 5 + 6 + 7 + 10, 7, 2, 4]


def test_losses_by_length_and_by_position_are_of_the_same_targets(prepared, model):
    cfg, made = prepared
    sets = data.contexts(cfg, made, [32, 256])
    by_length = loss_by_length(model, sets)
    by_position = loss_by_position(model, sets[256], [0, 32, 128, 256])
    assert list(by_position) == [(0, 32), (32, 128), (128, 256)]
    whole = sum(loss * (b - a) for (a, b), loss in by_position.items()) / 256
    assert by_length[256] == pytest.approx(whole, rel=1e-12) == heldout_loss(model, sets[256])
    assert by_length[32] == pytest.approx(heldout_loss(model, sets[32]), rel=1e-12) and by_length[32] != by_length[256]


def test_the_table_and_the_picture_show_before_and_after(tmp_path):
    found = {"before": {256: Recalled(1.0, 0.5, 8), 1024: Recalled(5.0, 0.0, 8)}, "after": {1024: Recalled(2.0, 0.25, 8)}}
    lines = table(found)
    assert lines[1].split() == ["256", "1.000", "50.0%"] and lines[2].split() == ["1,024", "5.000", "0.0%", "2.000", "25.0%"]
    figure = picture(found, trained_at=256)
    figure.savefig(tmp_path / "recall.png")
    losses, accuracy = figure.axes
    assert [line.get_ydata().tolist() for line in losses.get_lines()[:2]] == [[1.0, 5.0], [2.0]]
    assert [line.get_label() for line in accuracy.get_lines()[:2]] == ["before", "after"]


def cost(length: int, per_token: float, *, trained: bool = True) -> Cost:
    return Cost(length, trained, 1000, 1000 + int(per_token * length), 1.0, 7.0)


def test_memory_that_grows_with_the_square_of_the_length_is_seen():
    assert linear([cost(1024, 100), cost(4096, 110), cost(32768, 20, trained=False)])
    assert not linear([cost(4096, 400), cost(1024, 100)])
    assert not linear([cost(1024, 100), cost(32768, 20, trained=False), cost(65536, 40, trained=False)])


def test_lengths_that_are_no_numbers_are_refused():
    assert _numbers("64,128") == [64, 128]
    for words in ("", "64,x", "0"):
        with pytest.raises(UserError, match="lengths="):
            _numbers(words)


@pytest.mark.slow
def test_a_step_in_a_process_of_its_own():
    from recipes.bench.length import measured

    costs = [measured(length, True) for length in (512, 2048)]
    assert linear(costs) and all(math.isfinite(c.loss) and c.peak > c.before for c in costs)
