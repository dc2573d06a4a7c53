"""How far a layout may be from the single process, in each precision."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from recipes.proof.compare import Difference, compare
from recipes.proof.trace import Trace

# norm-relative, by precision: loss and gradient norm, gradients and forward outputs, weights of Muon, weights of AdamW
EXACT = {torch.float64: (1e-10, 1e-10, 1e-10, 1e-10), torch.float32: (1e-6, 1e-5, 1e-5, 1e-4)}
GAP = {torch.float64: 0.0, torch.float32: 1e-6}  # a selection gap below which rounding may route a token otherwise
# A bfloat16 layout may differ from the bfloat16 process by this multiple of what that process differs from float64. Two results
# with independent errors of equal size differ by sqrt(2) of it.
MULTIPLE = 3.0
ROUNDING = 2.0**-8  # of bfloat16, relative: what a quantity that happens to come out exact may differ by
SUMMED = 1e-5  # likewise of a loss or gradient norm, sums of many roundings kept in float32


@dataclass(frozen=True)
class Tolerances:
    loss: float
    grad_norm: float
    gradients: dict[str, float]
    weights: dict[str, float]
    outputs: dict[str, float]
    gap: float
    routes: float  # share of routing decisions that may differ with wider gaps
    derived: bool  # from a float64 run, and to be printed


def exact(reference: Trace) -> Tolerances:
    """For float64 and float32."""
    dtype = next(iter(reference.outputs.values())).dtype
    scalar, gradient, muon, adamw = EXACT[dtype]

    def of_weight(name: str) -> float:
        if name in reference.gradients:
            return muon if name in reference.muon else adamw
        if dtype == torch.float64:
            return adamw
        # A router bias is a quantile of a histogram: a score within rounding of a bin's edge is counted in the next bin, which
        # moves the quantile by at most a bin.
        bias = reference.weights[name].double()
        return reference.bins.get(name, 0.0) * math.sqrt(bias.numel()) / max(float(bias.norm()), 1e-30)

    return Tolerances(
        loss=scalar,
        grad_norm=scalar,
        gradients=dict.fromkeys(reference.gradients, gradient),
        weights={name: of_weight(name) for name in reference.weights},
        outputs=dict.fromkeys(reference.outputs, gradient),
        gap=GAP[dtype],
        routes=0.0,
        derived=False,
    )


def from_float64(reference: Trace, wide: Trace) -> Tolerances:
    """For bfloat16: `MULTIPLE` of what the single process in bfloat16 (`reference`) differs from it in float64 (`wide`).

    For float32 with quantised experts, too, and then at least `exact`'s: rounding to a coarse grid is not continuous. A number
    next to the middle of two codes falls to one of them in one layout and to the other in another, in float32 about one in
    a hundred thousand, and each of those moves by a sixteenth (MXFP8) or a half (MXFP4) of itself.
    """
    report = compare(wide, reference, exact(wide))
    least = exact(reference) if next(iter(reference.outputs.values())).dtype == torch.float32 else _rounding(reference)

    def each(differences: list[Difference], least: dict[str, float]) -> dict[str, float]:
        return {d.name: max(MULTIPLE * d.error, least[d.name]) for d in differences}

    return Tolerances(
        loss=max(least.loss, *(MULTIPLE * d.error for d in report.losses)),
        grad_norm=max(least.grad_norm, *(MULTIPLE * d.error for d in report.grad_norms)),
        gradients=each(report.gradients, least.gradients),
        weights=each(report.weights, least.weights),
        outputs=each(report.outputs, least.outputs),
        gap=least.gap,
        routes=min(1.0, MULTIPLE * len(report.routes) / max(1, report.routed)),
        derived=True,
    )


def _rounding(reference: Trace) -> Tolerances:
    """What bfloat16 may differ by where it happens to agree with float64."""
    rounding = MULTIPLE * ROUNDING
    return Tolerances(
        loss=MULTIPLE * SUMMED,
        grad_norm=MULTIPLE * SUMMED,
        gradients=dict.fromkeys(reference.gradients, rounding),
        weights=dict.fromkeys(reference.weights, rounding),
        outputs=dict.fromkeys(reference.outputs, rounding),
        gap=0.0,
        routes=0.0,
        derived=True,
    )
