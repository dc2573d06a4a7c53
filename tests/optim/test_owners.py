"""Where matrices lie in a flattened parameter, which of them a cut divides, and who owns those."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from optim.config import Distribution, MuonConfig, OptimConfig
from optim.exchange import Exchange, Gather, Matrix
from optim.matrices import Run, runs_of
from optim.owners import BALANCED, balanced, plan
from optim.table import Row, assign
from optim.work import flops
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


PARTS = [(0, 0), (0, 9), (9, 14), (14, 27), (27, 30)]  # matrices of 6 elements: 1 (ranks 1, 2), 2 (2, 3), 4 (3, 4)


def _routes(form: Distribution = Distribution.owners, work: int = 0) -> list[dict[int, object]]:
    return [plan({"w": _shard(PARTS, r)}, {"w": [RUNS[0]]}, lambda *_: work, form).routes for r in range(len(PARTS))]


def test_every_divided_matrix_has_one_owner_on_which_all_ranks_agree() -> None:
    routes = [r[0] for r in _routes()]
    assert all(isinstance(r, Exchange) for r in routes)  # also where nothing is held: the collective needs every rank
    assert [[m.place[1] for m in r.held] for r in routes] == [[], [1], [1, 2], [2, 4], [4]]
    owned = [[m.place[1] for m in r.owned] for r in routes]
    assert owned == [[], [1], [], [2, 4], []]  # 3:3, 2:4 and 3:3 elements; the lowest rank of equal ones
    assert plan({"w": _shard([(0, 12), (12, 30)], 0)}, {"w": [RUNS[0]]}, lambda *_: 0).routes == {}


def test_with_work_to_share_every_rank_gets_a_matrix() -> None:
    routes = [r[0] for r in _routes(work=1)]
    owners = [{m.place[1]: m.owner for m in (*r.held, *r.owned)} for r in routes]
    assert all(a[i] == b[i] for a, b in itertools.product(owners, owners) for i in a.keys() & b.keys())
    assert [[m.place[1] for m in r.owned] for r in routes] == [[2], [], [1], [], [4]]  # 0 and 3 stay whole on ranks 1 and 3
    assert not routes[0].held


def test_the_naive_form_brings_everything_to_everyone() -> None:
    for route in (r[0] for r in _routes(Distribution.gather)):
        assert isinstance(route, Gather)
        assert [m.place[1] for m in route.owned] == [0, 1, 2, 3, 4]


def _matrix(number: int, rows: int, *pieces: tuple[int, int, int]) -> Matrix:
    owner = max(pieces, key=lambda piece: piece[2] - piece[1])[0]
    return Matrix("w", (0, number), rows, 4, 0, pieces, owner)


def test_balance_moves_what_is_cheapest_to_send() -> None:
    cut, wholes = _matrix(0, 4, (0, 0, 10), (1, 10, 16)), [_matrix(i, 4, (0, 0, 16)) for i in (1, 2)]
    (first, *others) = balanced([cut, *wholes, _matrix(3, 4, (1, 0, 16))], [1] * 4, 2)
    assert first.owner == 1 and [m.owner for m in others] == [0, 0, 1]  # 4 elements more to send, not 16


def test_balanced_work_stays_where_it_lies() -> None:
    matrices = [_matrix(i, 4, (i % 4, 0, 16)) for i in range(80)]
    assert balanced(matrices, [1] * 80, 4) == matrices


@pytest.mark.parametrize("seed", range(5))
def test_any_spread_of_many_matrices_is_balanced(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    ranks = [int(8 * float(torch.rand((), generator=draw)) ** 2) for _ in range(200)]
    rows = torch.randint(2, 9, (200,), generator=draw).tolist()
    work = [flops(r, 4) for r in rows]
    after = balanced([_matrix(i, r, (rank, 0, 4 * r)) for i, (r, rank) in enumerate(zip(rows, ranks))], work, 8)
    loads = [sum(w for w, m in zip(work, after) if m.owner == rank) for rank in range(8)]
    assert max(loads) <= BALANCED * sum(work) / 8


def test_a_matrix_larger_than_its_share_stays_alone() -> None:
    after = balanced([_matrix(0, 100, (0, 0, 400)), _matrix(1, 4, (0, 0, 16)), _matrix(2, 4, (0, 0, 16))], [100, 1, 1], 2)
    assert [m.owner for m in after] == [0, 1, 1]
