"""The lines of `k3 estimate` beside memory: parameters, operations, bytes sent, the pipeline, and what a GPU makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from data.config import micro_batch, micro_batches
from k3 import flops
from k3.memory import Share
from parallel.config import world_size
from parallel.simulate import play
from parallel.stages import split_layers
from recipes.cards import aligned
from recipes.communication import AXES, Exchanged
from recipes.config import Config
from recipes.gpus import SPECS
from recipes.memory import WIDTHS, RankMemory
from recipes.search import Found, command
from recipes.speed import Speed

ORDER = ("projections", "kda", "attention", "dense", "experts", "shared", "latent", "router", "mixing", "head", "mtp")


def count(value: float) -> str:
    """A number in the unit that leaves one to four digits before the point."""
    for unit, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:,.2f} {unit}"
    return f"{value:,.2f} "


def model(cfg: Config) -> Iterator[str]:
    """Parameters, and the operations of a token by kind of module."""
    held = flops.parameters(cfg.model)
    mtp = f"; {held.mtp:,} more in MTP layers" if held.mtp else ""
    yield f"parameters: {held.total:,}, of which a token meets {held.active:,} (without the input embedding){mtp}"
    by_kind = flops.per_token(cfg.model, cfg.data.seq_length)
    total = sum(by_kind.values())
    shares = ", ".join(f"{kind} {by_kind[kind] / total:.1%}" for kind in ORDER if kind in by_kind)
    yield f"FLOPs a token, forward and backward, at {cfg.data.seq_length} tokens: {count(total)}FLOP; {shares}"
    again = _repeated(cfg)
    if again:
        yield f"computed once more for the activation policy: {again:.1%} of that"


def _stages(cfg: Config) -> list[list[flops.Work]]:
    layout, of = cfg.parallel, cfg.parallel.dp or 1
    share = Share(micro_batch(cfg.data, of), cfg.data.seq_length, WIDTHS[cfg.precision.name], layout)
    layers = split_layers(cfg.model.layers, layout)
    return [flops.stage(cfg.model, share, layers, number) for number in range(len(layers))]


def _repeated(cfg: Config) -> float:
    work = [w for stage in _stages(cfg) for w in stage]
    return sum(w.forward for w in flops.again(work, cfg.activations)) / max(1, sum(w.useful for w in work))


def pipeline(cfg: Config) -> Iterator[str]:
    """The bubble where a pass takes as long as its operations."""
    if cfg.parallel.pp == 1:
        return
    stages = _stages(cfg)
    ahead = [float(sum(w.forward for w in stage)) for stage in stages]
    again = [float(sum(w.forward for w in flops.again(stage, cfg.activations))) for stage in stages]
    back = [sum(w.backward for w in stage) + repeated for stage, repeated in zip(stages, again)]
    played = play(cfg.parallel, micro_batches(cfg.data, cfg.parallel.dp or 1), ahead, back)
    busiest = max(played.busy) / (sum(played.busy) / len(played.busy))
    yield (
        f"pipeline, simulated with each stage's operations: ranks wait {played.bubble:.1%} of a step; the busiest has "
        f"{busiest:.3f} of the mean work"
    )


def traffic(ranks: Sequence[Exchanged]) -> Iterator[str]:
    """Bytes a step of one rank by axis, of every pipeline rank."""
    axes = [axis for axis in AXES if any(axis in rank.sent for rank in ranks)]
    if not axes:
        return
    yield "sent in a step by one rank, in GB (owners: at most):"
    rows: list[Sequence[str]] = [("pipeline rank", *axes)]
    for number, rank in enumerate(ranks):
        rows.append((str(number), *(f"{rank.sent.get(axis, 0) / 1e9:,.3f}" if axis in rank.sent else "-" for axis in axes)))
    alike = [i for i in range(2, len(rows) - 1) if rows[i][1:] == rows[i - 1][1:] == rows[i + 1][1:]]
    yield from aligned([row for i, row in enumerate(rows) if i not in alike])


def speed(cfg: Config, s: Speed) -> Iterator[str]:
    """tokens/s and where the time goes."""
    assert cfg.gpu is not None
    gpus = world_size(cfg.parallel)
    yield (
        f"on {gpus} {cfg.gpu.name}: {s.tokens:,.1f} tokens/s/GPU, {s.tokens * gpus:,.0f} tokens/s, MFU {s.mfu:.1%} of "
        f"{s.peak / 1e12:,.0f} TFLOP/s; a step of {cfg.data.batch_size * cfg.data.seq_length:,} tokens takes {s.step:,.3f} s"
    )
    yield (
        f"  of it passes {s.pipeline / s.step:.1%} (ranks wait {s.bubble:.1%} of them; collectives inside them "
        f"{s.collectives / s.step:.1%} of the step), gradients behind them {s.gradients / s.step:.1%}, update "
        f"{s.update / s.step:.1%}, gathering weights {s.weights / s.step:.1%}"
    )
    assumed = ", ".join(f"{name} {value:g}" for name, value in vars(cfg.estimate).items())
    away = "; optim.offload's work and copies are not timed" if cfg.optim.offload.name != "none" else ""
    yield f"  assumed, keys estimate.*: {assumed}{away}"


def fit(cfg: Config, ranks: Sequence[RankMemory]) -> str:
    """Whether the fullest rank leaves the GPU the room that is assumed."""
    assert cfg.gpu is not None
    spec, most = SPECS[cfg.gpu], max(rank.memory.total for rank in ranks)
    fits = most <= spec.memory * cfg.estimate.memory
    return (
        f"{'fits' if fits else 'DOES NOT FIT'} {cfg.gpu.name}: {most / 1e9:,.1f} GB of {spec.memory / 1e9:,.0f} GB, of which "
        f"estimate.memory={cfg.estimate.memory:g} may be filled"
    )


def found(cfg: Config, words: Sequence[str], best: Sequence[Found], compared: int) -> Iterator[str]:
    """The table of a search, and the command of its first row."""
    assert cfg.gpu is not None
    if not best:
        yield f"none of {compared:,} layouts fits {cfg.gpus} {cfg.gpu.name}; give more, or a shorter data.seq_length"
        return
    yield f"the fastest that fit, of {compared:,} layouts and activation policies on {cfg.gpus} {cfg.gpu.name}, by the estimate:"
    columns = ("tp", "cp", "dp", "ep", "pp", "vpp")
    rows: list[Sequence[str]] = [
        ("tokens/s/GPU", "MFU", "step s", "waiting", "GB", *columns, "micro batch", "activations"),
    ]
    for one in best:
        sizes = [str(getattr(one.cfg.parallel, axis)) for axis in columns]
        rows.append((
            f"{one.speed.tokens:,.1f}", f"{one.speed.mfu:.1%}", f"{one.speed.step:,.2f}", f"{one.speed.bubble:.1%}",
            f"{one.worst.memory.total / 1e9:,.1f}", *sizes, str(one.cfg.data.micro_batch_size), one.activations or "as typed",
        ))  # fmt: skip
    yield from aligned(rows)
    yield ""
    yield command(words, best[0])
