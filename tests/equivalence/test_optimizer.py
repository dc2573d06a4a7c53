"""The optimizer on shards: every layout gives the weights of a single process that holds all tensors and all gradients."""

from __future__ import annotations

import dataclasses
import itertools
import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from optim.config import Distribution, OptimizerName
from parallel.config import ParallelConfig
from parallel.local import Helper
from tests.equivalence.optimizer_ranks import BAD, BREAK, BUCKET, KINDS, REFUSED, STEPS, Case, single
from tests.golden.vectors import relative_error

LAYOUTS = {
    "dp=2": ParallelConfig(dp=2),
    "dp=3": ParallelConfig(dp=3),
    "dp=4": ParallelConfig(dp=4),
    "cp=2": ParallelConfig(cp=2),
    "tp=2": ParallelConfig(tp=2),
    "tp=2 dp=2": ParallelConfig(tp=2, dp=2),
    "dp=4 ep=2": ParallelConfig(dp=4, ep=2),
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
CASES = [Case(dtype, per_head=per_head, zero=zero) for dtype, per_head, zero in itertools.product(DTYPES, (True, False), (1, 0))]
CASES += [Case(dtype, OptimizerName.adamw, zero=zero) for dtype, zero in itertools.product(DTYPES, (1, 0))]
CASES += [Case(dtype, distribution=Distribution.gather) for dtype in (torch.float64, torch.bfloat16)]
Rank = dict[str, Any]


def _name(case: Case) -> str:
    heads = "" if case.per_head else " whole matrices"
    form = " gathered" if case.distribution is Distribution.gather else ""
    return f"{str(case.dtype)[6:]} {case.optimizer.value}{heads}{form}{'' if case.zero else ' without zero'}"


reference = cache(single)


def _run(helper: Helper, layout: str, cases: list[Case], broken: str = "") -> list[list[Rank]]:
    """By case, the ranks' ends."""
    config = dataclasses.replace(LAYOUTS[layout], bucket=BUCKET)
    size = config.tp * config.cp * (config.dp or 1)
    results = helper.run_ranks("tests.equivalence.optimizer_ranks:train", size, config, cases, broken, timeout=120)
    return [list(ranks) for ranks in zip(*results)]


@pytest.fixture(scope="module", params=LAYOUTS)
def runs(request: pytest.FixtureRequest, helper: Helper) -> dict[Case, list[Rank]]:
    """All cases of one layout."""
    return dict(zip(CASES, _run(helper, request.param, CASES)))


def _whole(name: str, by_rank: list[tuple[Rank, Tensor]]) -> Tensor:
    """The whole tensor; all ranks that hold the same part of it must agree bit for bit."""
    _, blocks, placement, _ = KINDS[name]
    key, axis = ("expert", 0) if blocks.per_expert else ("tensor", {"shard(0)": 0, "shard(1)": 1}.get(placement.tensor.value))
    parts: dict[int, Tensor] = {}
    for rank, tensor in by_rank:
        same = parts.setdefault(0 if axis is None else rank[key], tensor)
        assert torch.equal(same, tensor), f"replicas of {name} differ"
    return parts[0] if axis is None else torch.cat([parts[i] for i in sorted(parts)], axis)


def _weight(name: str, ranks: list[Rank]) -> Tensor:
    return _whole(name, [(rank, rank["weights"][name]) for rank in ranks])


def _master(name: str, ranks: list[Rank]) -> Tensor:
    """Put together from the parts of all ranks."""
    holders = [{"tensor": t, "expert": e} for t, e in sorted({(r["tensor"], r["expert"]) for r in ranks})]
    out = []
    for holder in holders:
        shape = next(
            r["weights"][name].shape for r in ranks if r["tensor"] == holder["tensor"] and r["expert"] == holder["expert"]
        )
        value = torch.full(shape, torch.nan)
        for rank in ranks:
            alike = ("expert",) if KINDS[name][1].per_expert else ("tensor",)
            if name in rank["masters"] and all(rank[k] == holder[k] for k in alike):
                value.view(-1)[slice(*rank["parts"][name])] = rank["masters"][name].flatten()
        out.append((holder, value))
    return _whole(name, out)


def _replicas(ranks: list[Rank]) -> tuple[int, int]:
    """How many ranks hold the same dense parameters, and how many the same experts."""
    return len(ranks) // len({r["tensor"] for r in ranks}), len(ranks) // len({r["expert"] for r in ranks})


def _worst(case: Case, ranks: list[Rank]) -> float:
    return max(relative_error(_weight(name, ranks), want) for name, want in reference(case)["weights"].items())


@pytest.mark.parametrize("case", [c for c in CASES if c.dtype != torch.bfloat16], ids=_name)
def test_weights_are_those_of_a_single_process(runs: dict[Case, list[Rank]], case: Case) -> None:
    tolerance = 1e-10 if case.dtype == torch.float64 else 1e-5 if case.optimizer is OptimizerName.muon else 1e-4
    for name, want in reference(case)["weights"].items():
        assert relative_error(_weight(name, runs[case]), want) < tolerance, name


@pytest.mark.parametrize("case", [c for c in CASES if c.dtype == torch.bfloat16], ids=_name)
def test_bf16_weights_are_the_cast_of_masters_that_are_those_of_a_single_process(
    runs: dict[Case, list[Rank]], case: Case
) -> None:
    tolerance = 1e-5 if case.optimizer is OptimizerName.muon else 1e-4
    ranks, want = runs[case], reference(case)
    assert set(want["masters"]) == set(KINDS) - {"conv.weight"}
    for name in KINDS:
        if name in want["masters"]:
            master = _master(name, ranks)
            assert relative_error(master, want["masters"][name]) < tolerance, name
            assert torch.equal(_weight(name, ranks), master.bfloat16()), name
        else:
            assert relative_error(_weight(name, ranks), want["weights"][name]) < tolerance, name


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_every_rank_reports_what_a_single_process_reports(runs: dict[Case, list[Rank]], case: Case) -> None:
    ranks, want = runs[case], reference(case)["reports"]
    tolerance = 1e-12 if case.dtype == torch.float64 else 1e-6
    for step in range(STEPS):
        got = [rank["reports"][step] for rank in ranks]
        fields = [(r.step, r.lr, str(r.grad_norm), r.clip_coefficient, r.skipped, r.clipped_heads, r.max_logit) for r in got]
        assert len({str(f) for f in fields}) == 1, step
        assert got[0].skipped == want[step].skipped == (step in (BAD, REFUSED))
        assert (got[0].clipped_heads, got[0].max_logit) == (want[step].clipped_heads, want[step].max_logit)
        assert got[0].grad_norm == pytest.approx(want[step].grad_norm, rel=tolerance, nan_ok=True)
    assert math.isnan(want[BAD].grad_norm) and want[0].clipped_heads == 2


@pytest.mark.parametrize("case", [c for c in CASES if c.optimizer is OptimizerName.muon], ids=_name)
def test_blocks_are_reported_by_the_rank_that_updates_them(runs: dict[Case, list[Rank]], case: Case) -> None:
    ranks, want = runs[case], reference(case)["reports"][-1].update_rms
    tolerance = 1e-9 if case.dtype == torch.float64 else 1e-4
    for name, values in want.items():
        seen: list[int] = []
        for rank in ranks:
            if (own := rank["reports"][-1].update_rms.get(name)) is not None:
                blocks = rank["blocks"][name]
                torch.testing.assert_close(own, values[blocks], rtol=tolerance, atol=0)
                seen += blocks
        # ranks with copies report them all, as tensor ranks report a shared matrix
        counts = torch.bincount(torch.tensor(seen), minlength=len(values))
        assert len(counts) == len(values) and counts.min() == counts.max() > 0, name


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_state_exists_once(runs: dict[Case, list[Rank]], case: Case) -> None:
    ranks = runs[case]
    suffixes = (".momentum", ".exp_avg", ".exp_avg_sq", ".master")
    for rank in ranks:
        for name, (start, stop) in rank["parts"].items():
            shape = tuple(rank["weights"][name].shape)
            have = [rank["state"][name + s] for s in suffixes if name + s in rank["state"]]
            expected = shape if stop - start == math.prod(shape) else (stop - start,)
            assert all(got == expected for got in have) and bool(have) == (start < stop), name
    replicas = max(_replicas(ranks))
    cut = sum(0 < stop - start < r["weights"][n].numel() for r in ranks for n, (start, stop) in r["parts"].items())
    assert (cut > 0) == (case.zero > 0 and replicas > 1)


def test_a_loaded_state_gives_every_rank_its_weights_back(runs: dict[Case, list[Rank]]) -> None:
    assert all(rank["restored"] for ranks in runs.values() for rank in ranks)


def test_matrices_are_cut_and_their_owners_differ(runs: dict[Case, list[Rank]]) -> None:
    """Else the tests above would show nothing."""
    for case in CASES:
        ranks = runs[case]
        owners = [i for i, rank in enumerate(ranks) if rank["owned"]]
        dense, expert = _replicas(ranks)
        if case.distribution is Distribution.gather:
            wholes = [rank["owned"] for rank in ranks]
            assert expert > 1 or all(own == wholes[0] for own in wholes if wholes[0])
        elif case.optimizer is OptimizerName.muon and case.zero:
            assert len(owners) >= (2 if dense > 1 else 1)
            assert max(n for rank in ranks for n in rank["pieces"]) == max(dense, 2)
            names = {name for rank in ranks for name, _ in rank["owned"]}
            assert not expert > 1 or any(KINDS[name][1].per_expert for name in names)
        else:
            assert not owners


def test_matrices_of_a_bucket_travel_while_those_of_another_are_worked_on(helper: Helper) -> None:
    """Bucket k + 1 is on its way to the owners, and bucket k - 1 back from them, while bucket k is computed."""
    config = dataclasses.replace(LAYOUTS["dp=4"], bucket=BUCKET)
    computed_meanwhile = 0
    for log in helper.run_ranks("tests.equivalence.optimizer_ranks:overlap", 4, config, timeout=120):
        at = {entry: place for place, entry in enumerate(log)}
        routes = 1 + max(number for _, number in log)
        assert routes >= 3
        computed = [place for place, (what, _) in enumerate(log) if what == "compute"]
        for k in range(routes - 1):
            assert at["fetch", k + 1] < at["fetch arrived", k] < at["return", k] < at["fetch arrived", k + 1]
            assert at["fetch arrived", k + 1] < at["return arrived", k]
            computed_meanwhile += sum(at["fetch", k + 1] < place < at["fetch arrived", k + 1] for place in computed)
            computed_meanwhile += sum(at["return", k] < place < at["return arrived", k] for place in computed)
    assert computed_meanwhile >= 8  # of four ranks; one that owns nothing in a bucket has nothing to compute there


@pytest.mark.parametrize(
    "broken, layout, case",
    [
        ("returned pieces dropped", "dp=3", Case()),
        ("tensor gather skipped", "tp=2", Case()),
        ("copies counted", "tp=2", Case()),
        ("copies counted", "dp=2", Case(zero=0)),
    ],
)
def test_broken_code_is_noticed(helper: Helper, broken: str, layout: str, case: Case) -> None:
    assert broken in BREAK
    (sound,), (damaged,) = _run(helper, layout, [case]), _run(helper, layout, [case], broken)
    assert _worst(case, sound) < 1e-10 < 1e-7 < _worst(case, damaged)
