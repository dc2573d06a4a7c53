"""`k3 estimate ...`: what a layout takes of memory, operations, network and time; with search=true, which layout to take."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from k3.config import K3Config
from k3.qat import Qat
from recipes import estimate_lines as lines
from recipes.cards import aligned
from recipes.communication import communication
from recipes.compose import compose
from recipes.config import Config
from recipes.console import say
from recipes.errors import UserError
from recipes.memory import Memory, RankMemory, StageMemory, account
from recipes.search import search
from recipes.speed import speed

DATA_KEYS = ("data.seq_length", "data.micro_batch_size", "data.batch_size")
COLUMNS = (
    "stage", "rank", "holds", "parameters", "weights", "gradients", "optimizer", "a micro-batch", "in flight", "activations",
    "run again", "rows", "loss", "balancing", "buffers", "total", "in CPU memory",
)  # fmt: skip

MEMORY = (
    "memory of one rank; activations as the CPU kernels here save them; without temporaries of kernels and the optimizer's step",
)


def run(words: Sequence[str]) -> int:
    """Prints totals, a row a stage, a row a pipeline rank, and which rank takes most. Starts no process, builds no model.

    Raises UserError for a configuration that training would refuse, whatever this machine's size.
    """
    for word in words:
        key = word.lstrip("+~").split("=", 1)[0]
        if key.split(".", 1)[0] == "data" and key not in DATA_KEYS:
            raise UserError(f"{word}: changes no memory; of data, k3 estimate reads {', '.join(DATA_KEYS)}")
    cfg = compose(words, job="estimate")
    if cfg.search:
        best, compared = search(cfg, words)
        for line in lines.found(cfg, words, best, compared):
            say(line)
        return 0 if best else 1
    ranks, exchanged = account(cfg), communication(cfg)
    timed = [] if cfg.gpu is None else [*lines.speed(cfg, speed(cfg, cfg.gpu, exchanged)), ""]
    totals = [*lines.model(cfg), *lines.pipeline(cfg), *lines.traffic(exchanged), "", *timed]
    end = [] if cfg.gpu is None else [lines.fit(cfg, ranks)]
    for line in (*heading(cfg), *totals, *MEMORY, *table(cfg, ranks), "", *end, *verdict(ranks)):
        say(line)
    return 0


def heading(cfg: Config) -> list[str]:
    from data.config import micro_batch, micro_batches

    p, of = cfg.parallel, cfg.parallel.dp or 1
    axes = ", ".join(f"{axis} {getattr(p, axis)}" for axis in ("tp", "cp", "dp", "ep", "pp", "vpp"))
    batch = f"{micro_batches(cfg.data, of)} micro-batches of {micro_batch(cfg.data, of)} x {cfg.data.seq_length} tokens"
    zero = f"ZeRO-{p.zero}" if p.zero else "no ZeRO"
    qat = "" if cfg.qat.name is Qat.none else f", qat {cfg.qat.name.value}"
    return [
        f"{axes}; {zero}; precision {cfg.precision.name.value}{qat}; a step of a data rank: {batch}",
        "",
    ]


def table(cfg: Config, ranks: Sequence[RankMemory]) -> list[str]:
    """Stages in the model's order, then ranks; all for one rank of the tensor, context, expert and data axes."""
    stages = sorted((stage for rank in ranks for stage in rank.stages), key=lambda stage: stage.number)
    last = len(stages) - 1
    columns = len(COLUMNS) - (not any(rank.memory.offloaded for rank in ranks))
    rows: list[Sequence[str]] = [COLUMNS]
    for s in stages:
        rows.append((str(s.number), str(s.rank), holds(cfg.model, s, last), *_cells(s.memory, s.per_micro_batch, s.in_flight)))
    for r in ranks:
        numbers = "stages " if len(r.stages) > 1 else "stage "
        rows.append(("", str(r.rank), numbers + ", ".join(str(s.number) for s in r.stages), *_cells(r.memory)))
    rows_shown = aligned([row[:columns] for row in rows])
    return [*rows_shown[: len(stages) + 1], "", *rows_shown[len(stages) + 1 :]]


def holds(model: K3Config, stage: StageMemory, last: int) -> str:
    """`embedding, layers 0-6` or `layers 86-92, head, mtp`."""
    layers = stage.layers
    parts = ["embedding"] if stage.number == 0 or (stage.number == last and model.mtp_layers) else []
    if layers:
        parts.append(f"layers {layers.start}-{layers.stop - 1}" if len(layers) > 1 else f"layer {layers.start}")
    if stage.number == last:
        parts += ["head", *(["mtp"] if model.mtp_layers else [])]
    return ", ".join(parts)


def verdict(ranks: Sequence[RankMemory]) -> list[str]:
    """The rank that takes most, against the mean: 1.00 is an even layout."""
    worst = max(ranks, key=lambda rank: rank.memory.total)
    average = mean(rank.memory.total for rank in ranks)
    return [
        f"worst: pipeline rank {worst.rank} with {size(worst.memory.total)}, {worst.memory.total / average:.3f} of the mean "
        f"of {size(round(average))}",
    ]


def size(count: int) -> str:
    """Bytes in the unit that leaves one to four digits before the point."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= scale:
            return f"{count / scale:,.2f} {unit}"
    return f"{count / 2**10:,.2f} KiB" if count else "-"


def _cells(m: Memory, per_micro_batch: int | None = None, in_flight: int | None = None) -> tuple[str, ...]:
    return (
        f"{m.parameters:,}",
        *(size(x) for x in (m.weights, m.gradients, m.optimizer)),
        "" if per_micro_batch is None else size(per_micro_batch),
        "" if in_flight is None else str(in_flight),
        *(size(x) for x in (m.activations, m.again, m.rows, m.loss, m.balancing, m.buffers, m.total, m.offloaded)),
    )
