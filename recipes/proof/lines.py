"""A proof as its user reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from k3.activations import Save
from k3.qat import Qat
from optim.config import Offload
from parallel.config import sequence_parallel, world_size
from parallel.stages import group_size, split_layers
from recipes.config import Config
from recipes.errors import shown
from recipes.proof.compare import Difference, Report
from recipes.proof.tolerances import MULTIPLE, Tolerances
from recipes.proof.trace import Trace
from recipes.summary import versions

WORST = 5  # parameters shown unless all are
LISTED = 20  # routes shown unless all are


def heading(cfg: Config) -> Iterator[str]:
    """What is compared, and by which versions."""
    p, b = cfg.parallel, cfg.prove
    facts = {**versions(), "threads": 1}  # of each rank, not of this process
    yield "versions    " + ", ".join(f"{name} {value}" for name, value in facts.items())
    yield (
        f"layout      tp {p.tp}{' with sequence parallelism' if sequence_parallel(p) else ''}, cp {p.cp}, ep {p.ep}, dp {p.dp}, "
        f"pp {p.pp}, vpp {p.vpp}, {f'ZeRO-{p.zero}' if p.zero else 'no ZeRO'}"
    )
    if p.pp > 1:
        sizes = ", ".join(str(len(of)) for of in split_layers(cfg.model.layers, p))
        groups = f"; groups of {group_size(p, b.accumulation)} micro-batches" if p.vpp > 1 else ""
        warmup = ", sends overlapped in warm-up and flush too" if p.overlap_warmup else ""
        yield f"stages      {sizes} layers{groups}{warmup}{', reduced gradients in CPU memory' if p.offload_gradients else ''}"
    if cfg.optim.offload is Offload.cpu:
        yield "offloaded   masters and moments in CPU memory"
    if world_size(p) == 1:
        yield "            one process compared with itself: give parallel sizes, such as parallel.tp=2"
    if again := [f.name for f in dataclasses.fields(cfg.activations) if getattr(cfg.activations, f.name) is Save.recompute]:
        yield f"recomputed  {', '.join(again)}; in the single process nothing"
    if cfg.qat.name is not Qat.none:
        yield f"quantised   routed experts: weights MXFP4, what enters their products MXFP8, scale rule {cfg.qat.rule.name}"
    yield (
        f"batch       {cfg.phase}: {b.steps} steps of {b.accumulation} x {b.batch} rows of {b.length} tokens, documents: "
        f"{b.documents.name}, padding: {shown(b.padding)}, seed {b.seed}; {b.dtype.name}"
    )


def body(reference: Trace, layout: Trace, report: Report, tolerances: Tolerances, *, verbose: bool) -> Iterator[str]:
    """Everything compared, and at the end the verdict."""
    if tolerances.derived:
        yield from _derived(tolerances, str(next(iter(reference.outputs.values())).dtype).removeprefix("torch."))
    yield from _steps(reference, layout, report)
    yield from _worst("forward", "outputs of attention and feed-forward parts", report.outputs, verbose)
    yield from _worst("gradients", "parameters, first step", report.gradients, verbose)
    yield from _worst("weights", f"parameters and router biases, after {len(reference.losses)} steps", report.weights, verbose)
    if layout.processes > 1:
        yield f"drift       {len(report.drift) or 'no'} parameters differ bitwise between ranks that hold copies"
    yield from _loads(layout, report, verbose)
    for axis, collectives in layout.traffic.items():
        each = ", ".join(f"{name} {sent:,}" for name, sent in sorted(collectives.items()))
        yield f"traffic     {axis}: {sum(collectives.values()):,} bytes in the first step, all ranks together ({each})"
    for failure in report.failures():
        yield f"differs     {failure}"
    yield "PASS" if report.passed else "FAIL"


def _steps(reference: Trace, layout: Trace, report: Report) -> Iterator[str]:
    losses = iter(report.losses)
    for step, (a, b) in enumerate(zip(reference.losses, layout.losses)):
        for depth, (x, y) in enumerate(zip(a, b)):
            name = f"MTP {depth} loss" if depth else "loss"
            yield f"step {step + 1:<7}{name:<14}{x:.12g}  here {y:.12g}  {_measured(next(losses))}"
        x, y = reference.grad_norms[step], layout.grad_norms[step]
        yield f"            {'gradient norm':<14}{x:.12g}  here {y:.12g}  {_measured(report.grad_norms[step])}"


def _worst(name: str, what: str, differences: Sequence[Difference], verbose: bool) -> Iterator[str]:
    agree = sum(d.agrees for d in differences)
    yield f"{name:<12}{agree} of {len(differences)} {what} agree" + ("" if verbose else "; the farthest:")
    ordered = differences if verbose else sorted(differences, key=lambda d: d.error / (d.tolerance or 1), reverse=True)[:WORST]
    width = max((len(d.name) for d in ordered), default=0)
    for d in ordered:
        yield f"            {d.name:<{width}}  {_measured(d)}"


def _loads(layout: Trace, report: Report, verbose: bool) -> Iterator[str]:
    if not layout.loads:
        return
    most = max(float((load.max(1).values / load.double().mean(1)).max()) for load in layout.loads.values())
    yield (
        f"loads       {len(layout.loads)} routers, busiest expert {most:.2f} times the mean; {len(report.routes)} of "
        f"{report.routed:,} routing decisions differ"
    )
    shown_routes = report.routes if verbose else report.routes[:LISTED]
    for r in shown_routes:
        yield (
            f"            {r.router}, step {r.step}, micro-batch {r.micro_batch}, row {r.row}, token {r.token}: "
            f"selection gap {r.gap:.2e}"
        )
    if len(shown_routes) < len(report.routes):
        yield f"            and {len(report.routes) - len(shown_routes)} more; prove.verbose=true lists them"


def _derived(t: Tolerances, dtype: str) -> Iterator[str]:
    yield f"tolerances  {MULTIPLE:g} times what one process in {dtype} differs from itself in float64:"
    yield (
        f"            loss {t.loss:.1e}, gradient norm {t.grad_norm:.1e}, routing decisions {t.routes:.1%}; "
        + ", ".join(f"{name} {min(of.values()):.1e} to {max(of.values()):.1e}" for name, of in
                    (("forward", t.outputs), ("gradients", t.gradients), ("weights", t.weights)))
    )  # fmt: skip


def _measured(d: Difference) -> str:
    return f"{d.error:.1e}" + ("" if d.agrees else f" DIFFERS (tolerance {d.tolerance:.1e})")
