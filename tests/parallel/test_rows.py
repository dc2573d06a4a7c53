"""The row bank by itself: stages of toy layers whose payloads are handed over in one process, beside the whole stack at once."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from parallel.rows import RowBank, RowError, RowPlan

TOKENS, ROWS, WIDTH = 3, 2, 4


def _weights(layers: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(layers)]


def _input(micro_batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + micro_batch)
    return torch.randn(TOKENS, ROWS, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)


def _layer(index: int, weight: Tensor, prefix: Tensor, bank: tuple[Tensor, ...], block: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Reads every row, each with another factor, so that no two can be mistaken for one another."""
    read = prefix + sum((i + 2) * torch.sin(row) for i, row in enumerate(bank))
    out = torch.tanh(read @ weight)
    return (out, (*bank, prefix)) if index % block == 0 else (prefix + out, bank)


def _loss(prefix: Tensor, bank: tuple[Tensor, ...]) -> Tensor:
    return (prefix + sum((i + 3) * row for i, row in enumerate(bank))).pow(2).mean()


def _together(layers: int, block: int, micro_batches: int) -> tuple[float, list[Tensor]]:
    weights, total = _weights(layers), 0.0
    for m in range(micro_batches):
        prefix, bank = _input(m), ()
        for index, weight in enumerate(weights):
            prefix, bank = _layer(index, weight, prefix, bank, block)
        loss = _loss(prefix, bank)
        loss.backward()
        total += loss.item()
    return total, [w.grad for w in weights]


class _Pipeline:
    """The stages in one process, each rank with a bank of its own; every hop is a detached leaf, as a network makes it."""

    def __init__(self, sizes: list[int], pp: int, block: int):
        edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        self.layers = [range(a, b) for a, b in pairwise(edges)]
        self.plan = RowPlan(tuple(-(-of.stop // block) for of in self.layers), pp)
        self.banks = [RowBank(self.plan) for _ in range(pp)]
        self.weights, self.block = _weights(edges[-1]), block
        self.hops: list[int] = []  # rows and prefix of each payload, in the order of sending

    def forward(self, stage: int, micro_batch: int, payload: Tensor | None) -> Tensor:
        bank_of_rank = self.banks[stage % self.plan.pp]
        bank_of_rank.micro_batch = micro_batch
        prefix, bank = (_input(micro_batch), ()) if payload is None else bank_of_rank.receive(stage, payload)
        for index in self.layers[stage]:
            prefix, bank = _layer(index, self.weights[index], prefix, bank, self.block)
        if stage == self.plan.stages - 1:
            return _loss(prefix, bank)
        out = bank_of_rank.send(stage, prefix, bank)
        self.hops.append(len(out) // TOKENS)
        return out

    def step(self, micro_batches: int) -> float:
        """All forward passes and then all backward passes: the order in which most is kept at a time."""
        passes = {}
        for m in range(micro_batches):
            arriving = None
            for stage in range(self.plan.stages):
                out = self.forward(stage, m, arriving)
                passes[stage, m] = arriving, out
                arriving = out.detach().requires_grad_()
            assert not any(len(bank) for bank in self.banks), "rows are freed with their micro-batch"
        for m in range(micro_batches):
            gradient = None
            for stage in reversed(range(self.plan.stages)):
                arrived, out = passes[stage, m]
                out.backward(gradient)
                gradient = None if arrived is None else arrived.grad
        return sum(passes[self.plan.stages - 1, m][1].item() for m in range(micro_batches))


CUTS = {
    "a block a stage": ([2, 2, 2, 2], 2, 2),
    "inside blocks": ([3, 1, 2, 2], 2, 3),
    "four ranks twice": ([1] * 8, 4, 1),
    "three ranks twice": ([1, 2, 1, 2, 1, 2], 3, 2),
    "two ranks four times": ([1] * 8, 2, 3),
    "one stage a rank": ([2, 3, 1], 3, 2),
    "no layers at the ends": ([0, 3, 3, 0], 4, 2),
    "a stage that reads nothing": ([2, 0, 2, 2], 2, 1),
}


@pytest.mark.parametrize("name", CUTS)
def test_stages_compute_what_the_whole_computes(name: str) -> None:
    sizes, pp, block = CUTS[name]
    pipeline = _Pipeline(sizes, pp, block)
    loss = pipeline.step(3)
    expected, gradients = _together(sum(sizes), block, 3)
    assert loss == pytest.approx(expected, rel=1e-14)
    for weight, want in zip(pipeline.weights, gradients):
        torch.testing.assert_close(weight.grad, want, rtol=1e-13, atol=1e-14)
    assert [len(bank) for bank in pipeline.banks] == [0] * pp


@pytest.mark.parametrize("name", CUTS)
def test_a_hop_carries_the_prefix_and_what_the_next_rank_lacks(name: str) -> None:
    sizes, pp, block = CUTS[name]
    pipeline = _Pipeline(sizes, pp, block)
    pipeline.step(1)
    made = [-(-of.stop // block) for of in pipeline.layers]
    for stage, carried in enumerate(pipeline.hops):
        before = made[stage + 1 - pp] if stage + 1 >= pp else 0  # the bank when the next rank's previous stage had run
        assert carried == made[stage] - before + 1 == pipeline.plan.sent(stage) + 1


def test_without_gradients_nothing_is_recorded() -> None:
    pipeline = _Pipeline([1] * 6, 3, 1)
    with torch.no_grad():
        out = None
        for stage in range(6):
            out = pipeline.forward(stage, 0, out)
    assert not out.requires_grad and [len(bank) for bank in pipeline.banks] == [0] * 3


def test_what_is_left_of_an_aborted_step_can_be_cleared() -> None:
    pipeline = _Pipeline([2, 2, 2, 2], 2, 2)
    payload = pipeline.forward(0, 0, None)
    pipeline.forward(1, 0, payload)
    assert [len(bank) for bank in pipeline.banks] == [1, 1]
    for bank in pipeline.banks:
        bank.clear()
    assert [len(bank) for bank in pipeline.banks] == [0, 0]
    pipeline.step(2)
    _, gradients = _together(8, 2, 2)
    for weight, want in zip(pipeline.weights, gradients):
        torch.testing.assert_close(weight.grad, want, rtol=1e-13, atol=1e-14)


def test_what_does_not_fit_the_plan_is_said() -> None:
    pipeline = _Pipeline([2, 2, 2, 2], 2, 2)
    payload = pipeline.forward(0, 0, None)
    first, second = pipeline.banks
    with pytest.raises(RowError, match=r"stage 1: the bank holds 0 rows, and the plan says 2"):
        second.send(1, payload[:TOKENS], ())
    with pytest.raises(RowError, match=r"stage 2, micro-batch 5: 0 rows are kept .* the plan says 1 kept and 1 rows"):
        first.micro_batch = 5
        first.receive(2, payload)
