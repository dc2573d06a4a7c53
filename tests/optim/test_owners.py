"""Where matrices lie in a flattened parameter, which of them a cut divides, and who owns those."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from optim.config import MuonConfig, OptimConfig
from optim.matrices import Run, runs_of
from optim.owners import CutMatrix, plan
from optim.table import Row, assign
from parallel.cards import CardError
from parallel.shards import Shard
from tests.optim import cases

RUNS = [Run(0, 6, 5, 2, 3), Run(4, 10, 3, 2, 3), Run(7, 6, 1, 2, 3)]  # adjacent, with gaps between them, a single one


def _elements(run: Run, index: int) -> set[int]:
    return set(range(run.first + index * run.stride, run.first + index * run.stride + 6))


@pytest.mark.parametrize("run", RUNS)
def test_matrices_within_a_part_and_at_an_edge(run: Run) -> None:
    for start, stop in itertools.combinations(range(32), 2):
        low, high = run.within(start, stop)
        assert list(range(low, high)) == [i for i in range(run.count) if _elements(run, i) <= set(range(start, stop))]
        if low < high:
            part = run.part(low, high, start)
            assert part.views(torch.arange(start, stop)).flatten().tolist() == [
                e for i in range(low, high) for e in sorted(_elements(run, i))
            ]
    for edge in range(32):
        divided = [i for i in range(run.count) if {edge - 1, edge} <= _elements(run, i)]
        assert run.at(edge) == (divided[0] if divided else None)


def _rows(per_head: bool = True) -> dict[str, Row]:
    return {row.name: row for row in assign(cases.table(cases.parameters()), OptimConfig(muon=MuonConfig(per_head=per_head)))}


def _views(row: Row, tensor: Tensor) -> list[Tensor]:
    return [view for _, view in (row.blocks.views(tensor) if row.split else row.blocks.whole(tensor))]


@pytest.mark.parametrize("per_head", [True, False])
def test_runs_are_the_matrices_of_the_card(per_head: bool) -> None:
    for name, row in _rows(per_head).items():
        if row.blocks.is_matrix:
            tensor = torch.arange(torch.Size(row.shape).numel()).view(row.shape)
            runs = runs_of(row, tensor.shape, 1)
            assert all(torch.equal(r.views(tensor), v) for r, v in zip(runs, _views(row, tensor), strict=True)), name


def test_a_tensor_rank_has_a_piece_of_a_whole_matrix_but_whole_heads() -> None:
    half = torch.Size((16, 32))
    query, output = _rows()["layers.0.q.weight"], _rows()["layers.0.o.weight"]
    assert (query.tensor_cut, output.tensor_cut, _rows(per_head=False)["layers.0.q.weight"].tensor_cut) == (None, 0, 0)
    assert runs_of(query, half, 2) == [Run(0, 8 * 32, 2, 8, 32)]
    assert runs_of(output, half, 2) == [Run(0, 16 * 32, 1, 16, 32)]
    with pytest.raises(CardError, match=r"gate_up.weight: fused parts cannot be cut by rows over tensor ranks"):
        runs_of(_rows()["layers.0.gate_up.weight"], torch.Size((20, 32)), 2)
    with pytest.raises(CardError, match=r"experts.weight"):
        runs_of(_rows()["layers.0.experts.weight"], torch.Size((3, 12, 32)), 2)


def _shard(parts: list[tuple[int, int]], rank: int) -> Shard:
    return Shard(torch.nn.Parameter(torch.zeros(30)), tuple(parts), rank, "group", True)


def test_every_divided_matrix_has_one_owner_on_which_all_ranks_agree() -> None:
    parts = [(0, 0), (0, 9), (9, 14), (14, 27), (27, 30)]  # matrices of 6 elements: 1 (ranks 1, 2), 2 (2, 3), 4 (3, 4)
    exchanges = [plan({"w": _shard(parts, rank)}, {"w": [RUNS[0]]}) for rank in range(len(parts))]
    assert all(len(e) == 1 for e in exchanges)  # also where nothing is held: the collective needs every rank
    held = [[m.place[1] for m in e.held] for (e,) in exchanges]
    owned = [[m.place[1] for m in e.owned] for (e,) in exchanges]
    assert held == [[], [1], [1, 2], [2, 4], [4]]
    assert owned == [[], [1], [], [2, 4], []]  # 3:3, 2:4 and 3:3 elements; the lowest rank of equal ones
    assert plan({"w": _shard([(0, 12), (12, 30)], 0)}, {"w": [RUNS[0]]}) == []


def test_a_matrix_on_many_ranks_belongs_to_the_one_with_most() -> None:
    assert CutMatrix("w", (0, 0), 3, 4, 0, ((0, 2), (2, 7), (7, 12), (12, 12))).owner == 1
