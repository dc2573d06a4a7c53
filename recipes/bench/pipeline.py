"""`k3 bench pipeline`: what travels between pipeline stages, counted on four ranks of two virtual stages, beside the formulas."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import k3
from k3.config import K3Config
from k3.layout import row_plan
from parallel.config import ParallelConfig
from parallel.local import Helper
from parallel.stages import RowPlan
from recipes.console import say

LAYOUT = ParallelConfig(pp=4, vpp=2, dp=1)
LAYERS = 16  # two a stage: a block of Attention Residuals each
MICRO_BATCHES = 8
LENGTH, ROWS = 64, 2  # tokens and rows of a micro-batch
HEADER = 24  # bytes ahead of each payload: its shape, three int64


def run() -> None:
    """Prints the bytes of each hop and their sums, measured and computed."""
    with Helper() as helper:
        for line in table(helper):
            say(line)


def table(helper: Helper) -> Iterator[str]:
    model, layout = sizes(), LAYOUT
    plan, row = row_plan(model, layout), LENGTH * ROWS * model.hidden_size * 4
    ranks = helper.run_ranks("recipes.proof.pipeline_step:on_rank", layout.pp, model, layout, MICRO_BATCHES, ROWS, LENGTH)
    yield (
        f"bytes of a step of {MICRO_BATCHES} micro-batches: pp {layout.pp}, vpp {layout.vpp}, {model.layers} layers in blocks of "
        f"{model.residual_block}; a row has {row:,} bytes, a header {HEADER}"
    )
    yield f"{'hop':<10}{'new rows':>10}{'computed':>12}{'forward':>12}{'backward':>12}{'the whole bank':>18}"
    for stage in range(plan.stages - 1):
        forward, backward = of_hop(ranks, layout.pp, stage)
        yield (
            f"{f'{stage} -> {stage + 1}':<10}{plan.sent(stage):>10}{hop(plan, stage, row):>12,}{_shown(forward):>12}"
            f"{_shown(backward):>12}{hop_resending(plan, stage, row):>18,}"
        )
    passes = 2 * MICRO_BATCHES
    hops = range(plan.stages - 1)
    computed, resending = (passes * sum(of(plan, g, row) for g in hops) for of in (hop, hop_resending))
    yield f"{'all':<10}{'':>10}{computed:>12,}{total(ranks):>12,}{'':>12}{resending:>18,}"
    yield f"measured / computed {total(ranks) / computed:.6f}, measured / resending the bank {total(ranks) / resending:.3f}"
    p, v = layout.pp, layout.vpp
    cached, naive = p * (p - 1) // 2 + (v - 1) * p * p, plan.stages * (plan.stages - 1) // 2
    yield (
        f"rows a micro-batch and direction beside the prefixes: {sum(plan.sent(g) for g in hops)}; the report's bound P(P-1)/2 + "
        f"(V-1)P^2 = {cached}, resending C(C-1)/2 = {naive}, for one row a stage"
    )
    yield (
        f"rows were kept for at most {', '.join(str(rank.kept) for rank in ranks)} micro-batches at a time on ranks "
        f"{', '.join(map(str, range(p)))}, and for none after the step"
    )


def sizes() -> K3Config:
    return dataclasses.replace(k3.preset("tiny"), layers=LAYERS, residual_block=LAYERS // (LAYOUT.pp * LAYOUT.vpp))


def hop(plan: RowPlan, stage: int, row: int) -> int:
    """Bytes of one payload from `stage` to the next, or of its gradient back: new rows, the prefix, the header."""
    return (plan.sent(stage) + 1) * row + HEADER


def hop_resending(plan: RowPlan, stage: int, row: int) -> int:
    """The same where every hop carries the whole bank."""
    return (plan.made[stage] + 1) * row + HEADER


def of_hop(ranks: list[Any], pp: int, stage: int) -> tuple[list[int], list[int]]:
    """The messages of all micro-batches from `stage` to the next, and their gradients'."""
    return ranks[stage % pp].forward[stage], ranks[(stage + 1) % pp].backward[stage + 1]


def total(ranks: list[Any]) -> int:
    return sum(size for rank in ranks for way in (rank.forward, rank.backward) for sizes in way.values() for size in sizes)


def _shown(sizes: list[int]) -> str:
    return f"{sizes[0]:,}" if len(set(sizes)) == 1 else f"{min(sizes):,}-{max(sizes):,}"
