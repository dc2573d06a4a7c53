"""Whether `precision=fp8|mxfp8` can be honoured here: the hardware, Transformer Engine, the model's and the batch's shapes."""

from __future__ import annotations

from collections.abc import Iterator

from data.config import micro_batch
from k3.cards import describe
from k3.low_precision import LowPrecision, off_grid
from k3.presets import dense
from parallel.config import ParallelError, check_sizes, data_parallel_size, sequence_parallel
from recipes.config import Config, Precision

INSTALL = 'pip install --no-build-isolation "transformer_engine[pytorch,core_cu13]==2.20.2"'
NEEDS = {
    LowPrecision.fp8: "compute capability 9.0 (Hopper), where Transformer Engine has products with block scales",
    LowPrecision.mxfp8: "compute capability 10.x (Blackwell), which scales blocks of 32 in hardware",
}

INSTEAD = {9: "fp8", 10: "mxfp8"}  # by the major compute capability


def low_precision(precision: Precision) -> LowPrecision | None:
    return LowPrecision[precision.name] if precision.name in LowPrecision.__members__ else None


def refusals(cfg: Config, *, elsewhere: bool = False) -> Iterator[tuple[str, object, str]]:
    """(key, value, what is wrong and the fix) of the precision. elsewhere: the run is for other machines, which judge theirs."""
    name = cfg.precision.name
    kind = low_precision(name)
    if kind is None:
        return
    if elsewhere and not cfg.cluster.gpus_per_node:
        yield "precision", name, f"needs a GPU of {NEEDS[kind]}, and cluster.gpus_per_node=0; give precision=bf16"
    if not elsewhere and (reason := unfit(kind, *found(kind))):
        yield "precision", name, reason
    try:
        check_sizes(cfg.parallel)
    except ParallelError:
        return  # said elsewhere, and nothing can be divided by such sizes
    models = [cfg.model, dense()] if cfg.run.compare_dense > 0 else [cfg.model]
    if sizes := [size for model in models for size in off_grid(describe(model).values(), kind, cfg.parallel.tp)]:
        parameter, (rows, cols) = sizes[0]
        yield (
            "precision",
            name,
            f"takes matrices whose sides are multiples of {kind.grid} on each tensor rank, and {len(sizes)} are not, {parameter} "
            f"among them with {rows} x {cols}; give other sizes of the model (or of what run.compare_dense trains), another "
            "parallel.tp, or precision=bf16",
        )
    if (tokens := _tokens(cfg)) % kind.grid:
        yield (
            "precision",
            name,
            f"takes multiples of {kind.grid} tokens, and a micro-batch has {tokens} on a rank; give another data.seq_length or "
            "data.micro_batch_size, or precision=bf16",
        )


def _tokens(cfg: Config) -> int:
    """In a micro-batch, on one context rank and, where the sequence is cut, one tensor rank."""
    rows = micro_batch(cfg.data, data_parallel_size(cfg.parallel))
    return rows * cfg.data.seq_length // (cfg.parallel.cp * (cfg.parallel.tp if sequence_parallel(cfg.parallel) else 1))


def found(kind: LowPrecision) -> tuple[tuple[int, int] | None, str | None]:
    """(compute capability of this process's GPU or None, what Transformer Engine says against `kind`, or None)."""
    import torch

    if not torch.cuda.is_available():
        return None, None
    try:
        import transformer_engine.pytorch as te
    except Exception as error:  # a build for other libraries raises others than ImportError
        return torch.cuda.get_device_capability(), f"cannot be imported ({type(error).__name__}: {error}); {INSTALL}"
    ask = te.is_mxfp8_available if kind is LowPrecision.mxfp8 else te.is_fp8_block_scaling_available
    able, why = ask(return_reason=True)
    return torch.cuda.get_device_capability(), None if able else f"says: {why}"


def unfit(kind: LowPrecision, capability: tuple[int, int] | None, library: str | None) -> str | None:
    """Why a GPU of `capability` with a Transformer Engine that says `library` cannot train in `kind`, and the fix."""
    if capability is None:
        return f"needs a GPU of {NEEDS[kind]}, with Transformer Engine ({INSTALL}); there is no CUDA device, give precision=bf16"
    major, minor = capability
    here = f"this GPU has {major}.{minor}"
    if kind is LowPrecision.mxfp8 and major >= 12:
        return f"is refused by Transformer Engine from compute capability 12.0 on, and {here}; give precision=bf16"
    if major != (10 if kind is LowPrecision.mxfp8 else 9):
        return f"needs a GPU of {NEEDS[kind]}, and {here}; give precision={INSTEAD.get(major, 'bf16')}"
    return f"Transformer Engine {library}; or give precision=bf16" if library else None
