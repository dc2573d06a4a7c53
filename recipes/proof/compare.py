"""Whether two traces agree: pure functions of traces.

A difference is norm-relative, |a - b| / |b| in float64 with b from the single process. Where b is exactly zero (a weight that
nothing reads, such as the first layer's residual query), a must be exactly zero, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from recipes.proof.tolerances import Tolerances
    from recipes.proof.trace import Trace


@dataclass(frozen=True)
class Difference:
    """One quantity of a layout beside the single process's."""

    name: str
    error: float  # norm-relative; inf where only one side has it, or is not finite
    tolerance: float

    @property
    def agrees(self) -> bool:
        return self.error <= self.tolerance  # false for nan


@dataclass(frozen=True)
class Route:
    """One token that went to other experts than in the single process."""

    router: str
    step: int  # from 1
    micro_batch: int  # from 0, as the next two
    row: int
    token: int
    gap: float  # how far the single process was from choosing otherwise: its k-th best score + bias less the next


@dataclass(frozen=True)
class Report:
    losses: list[Difference]
    grad_norms: list[Difference]
    outputs: list[Difference]  # forward, in the order of execution
    gradients: list[Difference]  # in the model's order, as the next
    weights: list[Difference]
    drift: dict[str, list[str]]
    routes: list[Route]
    routed: int  # decisions compared
    loads: list[str]  # complaints about loads and routes that are no mere rounding
    skipped: list[str]

    @property
    def passed(self) -> bool:
        return not any(self.failures())

    def failures(self) -> Iterator[str]:
        """What is wrong, the most telling first; nothing where all is right."""
        for what, differences in (("parameter whose gradient differs", self.gradients), ("weight that differs", self.weights)):
            if wrong := [d for d in differences if not d.agrees]:
                yield f"the first {what} is {_said(wrong[0])}; {len(wrong)} of {len(differences)} do"
        if wrong := [d for d in self.outputs if not d.agrees]:
            yield f"the forward pass first differs at {_said(wrong[0])}"
        elif any(not d.agrees for d in (*self.gradients, *self.losses)):
            yield f"the first forward pass agrees in all {len(self.outputs)} parts"
        for what, differences in (("loss", self.losses), ("gradient norm", self.grad_norms)):
            if wrong := [d for d in differences if not d.agrees]:
                yield f"the {what} differs first at {_said(wrong[0])}"
        for name, axes in self.drift.items():
            yield f"copies of {name} are not bitwise equal over {' and '.join(axes)} ranks"
        yield from self.loads
        yield from self.skipped


def compare(reference: Trace, layout: Trace, tolerances: Tolerances) -> Report:
    """`reference` is the single process, `layout` what is judged."""
    t = tolerances
    skipped = list(_skipped(reference, layout))
    routes = list(_routes(reference, layout))
    routed = sum(gaps.numel() for gaps in reference.gaps.values())
    return Report(
        losses=list(_losses(reference, layout, t.loss)),
        grad_norms=[
            Difference(f"step {s + 1}", relative(a, b), t.grad_norm)
            for s, (a, b) in enumerate(zip(layout.grad_norms, reference.grad_norms, strict=True))
        ],
        outputs=_each(reference.outputs, layout.outputs, t.outputs),
        gradients=_each(reference.gradients, layout.gradients, t.gradients),
        weights=_each(reference.weights, layout.weights, t.weights),
        drift=layout.drift,
        routes=routes,
        routed=routed,
        loads=[*miscounted(reference, "the single process"), *miscounted(layout, "the layout"), *_judged(routes, routed, t)],
        skipped=skipped,
    )


def relative(a: float | Tensor, b: float | Tensor) -> float:
    """|a - b| / |b|; 0 for two zeros, inf where only b is zero, the shapes differ or anything is not finite."""
    x, y = (torch.as_tensor(v, dtype=torch.float64) for v in (a, b))
    if x.shape != y.shape:
        return math.inf
    difference, size = float((x - y).norm()), float(y.norm())
    if not math.isfinite(difference + size):
        return math.inf
    if size:
        return difference / size
    return math.inf if (x != y).any() else 0.0  # the norm of the tiniest numbers is zero, too


def _skipped(reference: Trace, layout: Trace) -> Iterator[str]:
    """Complaints about steps that were skipped on one side alone, or because something was not finite."""
    for step, (theirs, own) in enumerate(zip(reference.skipped, layout.skipped, strict=True)):
        if own and (theirs is None or "not finite" in own):
            yield f"step {step + 1} was skipped: {own}"
        elif theirs and not own:
            yield f"step {step + 1} was skipped by the single process alone: {theirs}"


def miscounted(trace: Trace, who: str) -> Iterator[str]:
    """Complaints where a balancer's loads are not the tokens that its router sent, each once, padding excluded."""
    for router, loads in trace.loads.items():
        for step, load in enumerate(loads):
            chosen, counted = trace.chosen[router][step], trace.counted[step]
            counted = counted.repeat_interleave(len(chosen) // len(counted), 0)  # a draft routes every token several times
            sent = chosen[counted].long().flatten().bincount(minlength=load.numel())
            if not torch.equal(sent, load):
                expert = int((sent != load).nonzero()[0])
                yield (
                    f"loads of {router} at step {step + 1}: {who} counted {int(load[expert])} tokens for expert {expert}, and "
                    f"{int(sent[expert])} went there"
                )
                break


def _each(reference: Mapping[str, Tensor], layout: Mapping[str, Tensor], tolerances: Mapping[str, float]) -> list[Difference]:
    nothing = torch.full((1,), math.nan)
    names = [*reference, *(name for name in layout if name not in reference)]
    return [Difference(n, relative(layout.get(n, nothing), reference.get(n, nothing)), tolerances.get(n, 0.0)) for n in names]


def _losses(reference: Trace, layout: Trace, tolerance: float) -> Iterator[Difference]:
    for step, (a, b) in enumerate(zip(layout.losses, reference.losses, strict=True)):
        for depth, (x, y) in enumerate(zip(a, b, strict=True)):
            yield Difference(f"step {step + 1}" + (f", MTP {depth}" if depth else ""), relative(x, y), tolerance)


def _routes(reference: Trace, layout: Trace) -> Iterator[Route]:
    for router, chosen in reference.chosen.items():
        differs = (chosen != layout.chosen[router]).any(-1)
        for step, micro, token, row in differs.nonzero().tolist():
            yield Route(router, step + 1, micro, row, token, float(reference.gaps[router][step, micro, token, row]))


def _judged(routes: list[Route], routed: int, t: Tolerances) -> Iterator[str]:
    wide = [r for r in routes if not r.gap < t.gap]
    if len(wide) > t.routes * routed:
        r = max(wide, key=lambda r: r.gap)
        yield (
            f"{len(wide)} of {routed} routing decisions differ with selection gaps of {t.gap:g} or more, and a share of "
            f"{t.routes:.3g} may; the widest gap is {r.gap:.2e} at {r.router}, step {r.step}, micro-batch {r.micro_batch}, "
            f"row {r.row}, token {r.token}"
        )


def _said(d: Difference) -> str:
    return f"{d.name} ({d.error:.2e}, tolerance {d.tolerance:.2e})"
