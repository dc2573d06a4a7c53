"""`k3 prove`: runs a parallel layout and a single process on this machine's CPU and compares all they compute."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence

from k3.layout import check_layout
from k3.qat import Qat
from parallel.config import check_sizes, world_size
from parallel.local import Helper, RankError
from parallel.stages import group_size
from recipes import processes
from recipes.compose import compose
from recipes.config import Config, ProofDType
from recipes.console import say
from recipes.errors import UserError, shown
from recipes.proof import lines
from recipes.proof.batches import least_length
from recipes.proof.compare import compare
from recipes.proof.tolerances import exact, from_float64
from recipes.proof.trace import single, trace
from recipes.validate import check_memory

MOST = 8  # processes


def run(words: Sequence[str]) -> int:
    """Prints the proof and returns 0 where the layout agrees with the single process, else 1. Raises UserError."""
    if (started := processes.count(os.environ)) is not None:
        raise UserError(f"k3 prove starts its processes itself, and a launcher has started {started}; start it without")
    cfg = compose(words, job="prove")
    check(cfg)
    for line in lines.heading(cfg):
        say(line)
    try:
        with Helper() as helper:
            return prove(cfg, helper)
    except RankError as error:
        print(f"k3: {error}", file=sys.stderr)
        return 1


def prove(cfg: Config, helper: Helper) -> int:
    """As `run`, for a checked configuration."""
    reference = trace(single(cfg), helper)
    dtype = cfg.prove.dtype
    if dtype is ProofDType.bfloat16 or (dtype is ProofDType.float32 and cfg.qat.name is not Qat.none):
        wide = dataclasses.replace(cfg, prove=dataclasses.replace(cfg.prove, dtype=ProofDType.float64))
        tolerances = from_float64(reference, trace(single(wide), helper))
    else:
        tolerances = exact(reference)
    layout = trace(cfg, helper)
    report = compare(reference, layout, tolerances)
    for line in lines.body(reference, layout, report, tolerances, verbose=cfg.prove.verbose):
        say(line)
    return 0 if report.passed else 1


def check(cfg: Config) -> None:
    """Raises UserError or ParallelError for what cannot run, before a process starts."""
    wrong = [f"{key}={shown(value)}: {text}" for key, value, text in _refusals(cfg)]
    if wrong:
        raise UserError("\n".join(wrong))
    check_sizes(cfg.parallel)  # again, because parallel.dp is known by now
    check_layout(cfg.model, cfg.parallel, length=cfg.prove.length)
    if cfg.parallel.vpp > 1:
        group_size(cfg.parallel, cfg.prove.accumulation, fix=f"give prove.accumulation={cfg.parallel.pp}")
    check_memory(cfg, on_cpu=True, width=8 if cfg.prove.dtype is ProofDType.float64 else 4)


def _refusals(cfg: Config) -> Iterator[tuple[str, object, str]]:
    p, b = cfg.parallel, cfg.prove
    for name, least in (("steps", 1), ("batch", 1), ("accumulation", 1), ("seed", 0)):
        if getattr(b, name) < least:
            yield f"prove.{name}", getattr(b, name), f"must be at least {least}"
    least = max(2 + cfg.model.mtp_layers, least_length(b.documents))
    if b.length < least:
        yield "prove.length", b.length, f"must be at least {least} with prove.documents={b.documents.name}"
    size = world_size(p)
    if size > MOST:
        yield (
            "parallel",
            f"tp*pp*cp*dp = {p.tp}*{p.pp}*{p.cp}*{p.dp} = {size}",
            f"a proof runs at most {MOST} processes on one machine; give smaller sizes",
        )
    elif p.dp is not None and b.batch % p.dp:
        yield "prove.batch", b.batch, f"must be a multiple of parallel.dp={p.dp}: each data rank reads whole rows"
