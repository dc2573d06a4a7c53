"""`k3 bench muon`: heads get equal updates by themselves and not together, and every side does the same work."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

import k3
from optim.config import MuonPrecision
from recipes.bench import muon as bench


def test_head_updates_are_equal_by_themselves_and_not_together() -> None:
    per_head, whole = bench.head_rms(per_head=True), bench.head_rms(per_head=False)
    assert len(per_head) == len(whole) == 4
    assert max(per_head) < 1.05 * min(per_head)
    assert whole[0] > 8 * max(whole[1:])


def test_the_parameter_sets_are_those_of_small() -> None:
    attention, everything = bench.parameter_sets(k3.preset("small")).values()
    assert {card.name.rsplit(".", 2)[1] for card in attention} == {"q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj"}
    assert {card.shape for card in attention} == {(1024, 1024), (1536, 384), (2048, 256)}
    assert {card.name for card in attention} < {card.name for card in everything}
    assert not any("router" in card.name for card in everything)  # AdamW's


@pytest.mark.parametrize("precision", list(MuonPrecision))
def test_all_sides_do_the_same_and_are_timed(monkeypatch: pytest.MonkeyPatch, precision: MuonPrecision) -> None:
    monkeypatch.setattr(bench, "ROUNDS", 2)
    (_, cards) = bench.parameter_sets(k3.preset("tiny")).values()
    rows = bench.compare(cards, precision)
    names = {"k3 per head", "k3 whole matrix", "emerging-optimizers Muon"}
    assert {row["name"] for row in rows} >= names | ({"torch.optim.Muon"} if precision is MuonPrecision.bf16 else set())
    assert all(len(row["per_round"]) == 2 and row["seconds"] > 0 for row in rows)
    assert not bench.best_other(rows)["ours"]


def test_a_side_that_does_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    others = bench._others

    def wrong(*args: object) -> Iterator[bench.Side]:
        for side in others(*args):
            yield dataclasses.replace(side, step=lambda: None)

    monkeypatch.setattr(bench, "_others", wrong)
    (_, cards) = bench.parameter_sets(k3.preset("tiny")).values()
    with pytest.raises(RuntimeError, match="emerging-optimizers Muon and k3 whole matrix differ"):
        bench.compare(cards, MuonPrecision.full)


def test_ratios_are_of_neighbouring_times() -> None:
    assert bench.ratio({"per_round": [1.0, 10.0, 1.0]}, {"per_round": [3.0, 30.0, 2.0]}) == pytest.approx(3.0)


def test_both_updates_and_the_threads_are_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "parameter_sets", lambda model: {})
    bench.run()
    printed = capsys.readouterr().out
    assert f"threads {torch.get_num_threads()}" in printed and "per head" in printed and "whole matrix" in printed
