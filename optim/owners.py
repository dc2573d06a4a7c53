"""Who orthogonalises which matrix where ZeRO's cut spreads them over ranks (report 5.2.2: an owner fetches only what it lacks).

A matrix belongs to the rank with most of it, unless that would leave the ranks with unequal work: then the matrices that are
cheapest to send go to ranks with less, whole ones if need be. All ranks of a group derive the same plan from the same parts, so
nothing is negotiated.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from optim.config import Distribution
from optim.exchange import Exchange, Gather, Matrix, Route
from optim.matrices import Run
from parallel.shards import Shard, Shards

BALANCED = 1.05  # max/mean of the ranks' FLOPs below which no matrix is moved for the sake of balance
Flops = Callable[[str, Run], int]  # of orthogonalising one matrix of the parameter's run


@dataclass
class Plan:
    """What this rank does with the matrices of all its groups."""

    distribution: Distribution
    routes: dict[int, Route] = field(default_factory=dict)  # by bucket, in the model's order; of those with moving matrices
    flops: int = 0  # of a Newton-Schulz step over all matrices that this rank orthogonalises
    elements: int = 0  # of these matrices
    matrices: int = 0  # of which ranks of a group have to agree on the owner
    cut: int = 0  # of them lie on several ranks
    given: int = 0  # of them lie whole on one rank and belong to another

    @property
    def sent_bytes(self) -> int:
        """By this rank in a step."""
        return sum(route.sent_bytes for route in self.routes.values())


@dataclass(frozen=True)
class Balance:
    """What the plan comes to for the ranks of a pipeline stage."""

    plan: Plan
    ranks: int
    imbalance: float  # max/mean of Newton-Schulz FLOPs
    sent_bytes: float  # by a rank in a step, on average
    most_sent_bytes: int

    def describe(self) -> str:
        p = self.plan
        return (
            f"distribution of {p.matrices} matrices over {self.ranks} ranks ({p.distribution.value}): {p.cut} cut, {p.given} "
            f"whole ones given away; Newton-Schulz FLOPs max/mean {self.imbalance:.3f}; a rank sends {self.sent_bytes / 1e6:.3g} "
            f"MB a step, at most {self.most_sent_bytes / 1e6:.3g} MB"
        )


def measured(plan: Plan, shards: Shards, device: torch.device) -> Balance:
    """Every rank of the stage must call it."""
    own = torch.tensor([plan.flops, plan.sent_bytes], dtype=torch.float64, device=device)
    work, sent = shards.over_tensor_ranks(shards.over_data_ranks(own)).view(-1, 2).unbind(1)
    return Balance(plan, len(work), float(work.max() / work.mean()), float(sent.mean()), int(sent.max()))


def plan(
    shards: Mapping[str, Shard], runs: Mapping[str, Sequence[Run]], flops: Flops, distribution: Distribution = Distribution.owners
) -> Plan:
    """The routes of a step, the same on every rank; none where nothing moves.

    shards, runs: of every parameter of Muon on any rank, in the model's order.
    """
    out = Plan(distribution)
    groups: dict[Any, list[tuple[Matrix, int]]] = {}
    for name, shard in shards.items():
        if shard.group is None:
            out.flops += sum(run.count * flops(name, run) for run in runs[name])
            out.elements += sum(run.count * run.size for run in runs[name])
        else:
            groups.setdefault(shard.group, []).extend(_matrices(name, shard, runs[name], flops))
    for found in groups.values():
        matrices, work = [m for m, _ in found], [w for _, w in found]
        shard = shards[matrices[0].name]
        rank = shard.rank
        if distribution is Distribution.owners:
            matrices = balanced(matrices, work, len(shard.parts))
        mine = [(m, w) for m, w in zip(matrices, work) if distribution is Distribution.gather or m.owner == rank]
        out.flops += sum(w for _, w in mine)
        out.elements += sum(m.size for m, _ in mine)
        out.matrices += len(matrices)
        out.cut += sum(len(m.holders) > 1 for m in matrices)
        out.given += sum(len(m.holders) == 1 and not m.held_by(m.owner) for m in matrices)
        out.routes |= _routes(matrices, shards, distribution)
    return out


def _routes(matrices: Iterable[Matrix], shards: Mapping[str, Shard], distribution: Distribution) -> Iterator[tuple[int, Route]]:
    by_bucket: dict[int, list[Matrix]] = {}
    for matrix in matrices:
        if distribution is Distribution.gather or matrix.length(matrix.owner) < matrix.size:
            by_bucket.setdefault(shards[matrix.name].bucket, []).append(matrix)
    for bucket, moving in sorted(by_bucket.items()):
        shard = shards[moving[0].name]
        dtype = torch.float32 if shard.parameter.dtype == torch.bfloat16 else shard.parameter.dtype  # of the masters
        like = torch.empty(0, dtype=dtype, device=shard.parameter.device)
        form = Exchange if distribution is Distribution.owners else Gather
        yield bucket, form(shard.group, shard.rank, len(shard.parts), moving, like)


def _matrices(name: str, shard: Shard, runs: Sequence[Run], flops: Flops) -> Iterator[tuple[Matrix, int]]:
    """Every matrix of a parameter, owned by the rank with most of it (of equal ones the lowest), and its FLOPs."""
    parts = [(rank, start, stop) for rank, (start, stop) in enumerate(shard.parts) if start < stop]
    edges = [stop for _, _, stop in parts]
    for number, run in enumerate(runs):
        work = flops(name, run)
        for i in range(run.count):
            first = run.first + i * run.stride
            last = first + run.size
            inside = parts[bisect_right(edges, first) : bisect_left(edges, last) + 1]
            pieces = tuple((rank, max(start, first) - first, min(stop, last) - first) for rank, start, stop in inside)
            owner = max(pieces, key=lambda piece: piece[2] - piece[1])[0]
            yield Matrix(name, (number, i), run.rows, run.cols, first, pieces, owner), work


def balanced(matrices: Sequence[Matrix], work: Sequence[int], ranks: int) -> list[Matrix]:
    """The matrices with owners changed until the ranks' work is even (max/mean at most BALANCED) or no change makes it more so.

    Each change takes work from the rank with most, and is the one that sends the fewest elements for it.
    """
    owners = [m.owner for m in matrices]
    loads = [0] * ranks
    owned: list[list[int]] = [[] for _ in loads]
    for i, (owner, flops) in enumerate(zip(owners, work)):
        loads[owner] += flops
        owned[owner].append(i)
    limit = BALANCED * sum(loads) / len(loads)
    while max(loads) > limit:
        high, low = loads.index(max(loads)), loads.index(min(loads))
        best: tuple[bool, float, int, int] | None = None
        for i in owned[high]:
            m = matrices[i]
            for to in {low, *m.holders} - {high}:
                after = loads[to] + work[i]
                if after < loads[high]:
                    # one that fits, else one that leaves the receiver with less than the sender has now
                    key = (after > limit, (m.length(high) - m.length(to)) / work[i], i, to)
                    best = key if best is None else min(best, key)
        if best is None:
            break
        _, _, i, to = best
        owned[high].remove(i)
        owned[to].append(i)
        loads[high] -= work[i]
        loads[to] += work[i]
        owners[i] = to
    return [m if m.owner == owner else replace(m, owner=owner) for m, owner in zip(matrices, owners)]
