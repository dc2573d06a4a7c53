"""Proofs as tests: a layout's trace beside the single process's, which equal configurations share."""

from __future__ import annotations

from parallel.config import ParallelConfig
from parallel.local import Helper
from recipes.compose import compose
from recipes.config import Config
from recipes.proof.compare import Report, compare
from recipes.proof.tolerances import exact, from_float64
from recipes.proof.trace import Trace, single, trace
from recipes.prove import check

SHORT = "model=tiny prove.batch=4 prove.length=64 prove.steps=2 prove.accumulation=1"
_references: dict[str, Trace] = {}


def config(words: str) -> Config:
    """`SHORT` and then `words`, as a user would type them behind `k3 prove`."""
    typed = {word.split("=")[0]: word for word in f"{SHORT} {words}".split()}
    cfg = compose(list(typed.values()), job="prove")
    check(cfg)
    return cfg


def reference(cfg: Config, helper: Helper) -> Trace:
    alone = single(cfg)
    key = repr(alone)
    if key not in _references:
        assert alone.parallel == ParallelConfig(dp=1)
        _references[key] = trace(alone, helper, traffic=False)
    return _references[key]


def prove(words: str, helper: Helper) -> Report:
    cfg = config(words)
    one = reference(cfg, helper)
    return compare(one, trace(cfg, helper, traffic=False), exact(one))


def prove_bfloat16(words: str, helper: Helper) -> Report:
    cfg = config(f"{words} prove.dtype=bfloat16")
    one = reference(cfg, helper)
    wide = reference(config(f"{words} prove.dtype=float64"), helper)
    return compare(one, trace(cfg, helper, traffic=False), from_float64(one, wide))


def prove_float32(words: str, helper: Helper) -> tuple[Report, dict[str, float], dict[str, float]]:
    """(the proof, how far each gradient of the layout is from a single process in float64, and how far a float32 one is)."""
    cfg = config(f"{words} prove.dtype=float32")
    one, wide = reference(cfg, helper), reference(config(f"{words} prove.dtype=float64"), helper)
    layout = trace(cfg, helper, traffic=False)
    from_wide = ({d.name: d.error for d in compare(wide, of, exact(wide)).gradients} for of in (layout, one))
    return compare(one, layout, exact(one)), *from_wide
