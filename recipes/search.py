"""`k3 estimate search=true gpus=N gpu=NAME`: the fastest layouts that fit, by the estimate, and the words that use one."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from hydra.core.override_parser.types import Override

from k3.activations import OPTIONS, ActivationConfig
from parallel.config import ParallelConfig, data_parallel_size, world_size
from recipes.config import Config, Precision
from recipes.errors import UserError, shown
from recipes.gpus import SPECS
from recipes.memory import WIDTHS, RankMemory, account, cards_by_stage
from recipes.speed import Clock, Known, Speed, speed
from recipes.validate import misfits

CHOSEN = ("tp", "sp", "cp", "dp", "ep", "pp", "vpp", "split", "group")  # of parallel, by a search
MICRO_BATCHES = (1, 2, 4, 8)
VIRTUAL = (1, 2, 3, 4, 6)
LEAST_STRETCH = 1024  # tokens of a context rank: shorter ones leave the GPU idle
SHOWN = 8


@dataclass(frozen=True)
class Found:
    cfg: Config
    activations: str  # an option of the group, or "" where typed
    speed: Speed
    worst: RankMemory


def settle(cfg: Config, words: Sequence[Override]) -> None:
    """Makes `parallel.dp` what `gpus` leaves, and judges gpu, gpus, search and estimate together. Raises UserError."""
    typed = [word.key_or_group for word in words]
    for name, value in vars(cfg.estimate).items():
        least = 1 if name == "imbalance" else 0
        share = name not in ("touches", "imbalance", "latency")
        if not (least <= value and (value > 0 or name in ("hidden", "latency")) and (value <= 1 or not share)):
            limit = "must lie in [0, 1)" if name == "hidden" else "must lie in (0, 1]" if share else f"must be at least {least}"
            raise UserError(f"estimate.{name}={value}: {limit}")
    if cfg.gpus is not None and cfg.gpus < 1:
        raise UserError(f"gpus={cfg.gpus}: must be at least 1")
    if cfg.gpu is None and (idle := next((key for key in typed if key.startswith("estimate.")), None)):
        raise UserError(f"{idle}: is read for a GPU alone; give gpu=NAME, one of {', '.join(g.name for g in SPECS)}")
    if cfg.gpu is not None and cfg.precision.name is Precision.fp64:
        raise UserError(f"gpu={cfg.gpu.name}: is timed in bf16 and fp32; give precision=bf16, or leave gpu out")
    if not cfg.search:
        _take(cfg)
        return
    for key, value in (("gpu", cfg.gpu), ("gpus", cfg.gpus)):
        if value is None:
            raise UserError(f"search=true: needs {key}; give gpu=NAME gpus=NUMBER")
    for key in typed:
        if key == "parallel" or key.removeprefix("parallel.") in CHOSEN:
            raise UserError(f"{key}: is what search=true chooses; leave it out, or give search=false")
    cfg.parallel = replace(cfg.parallel, **{key: getattr(ParallelConfig(), key) for key in CHOSEN})


def _take(cfg: Config) -> None:
    """With `gpus`, the data ranks are what the other axes leave of them."""
    if cfg.gpus is None:
        return
    p = cfg.parallel
    if p.dp is None and cfg.gpus % (inner := p.tp * p.pp * p.cp):
        raise UserError(f"gpus={cfg.gpus}: must be a multiple of tp * pp * cp = {p.tp} * {p.pp} * {p.cp} = {inner}")
    size = world_size(p, cfg.gpus)
    if size != cfg.gpus:
        raise UserError(f"gpus={cfg.gpus}: the layout takes {size}, tp * pp * cp * dp; leave gpus out, or give parallel.dp=null")
    p.dp = data_parallel_size(p, cfg.gpus)


def search(cfg: Config, words: Sequence[str]) -> tuple[list[Found], int]:
    """The best layouts, fastest first, and how many were compared. `words` as typed. `cfg` has been settled."""
    fixed = any(word.startswith("activations") for word in words)
    policies: dict[str, ActivationConfig] = {"": cfg.activations} if fixed else {n: make() for n, make in OPTIONS.items()}
    known: Known = {}
    assert cfg.gpu is not None
    ordered = []
    for number, one in enumerate(_candidates(cfg)):
        for name, policy in policies.items():
            there = replace(one, activations=policy)
            tokens = cfg.data.batch_size * cfg.data.seq_length
            ordered.append((Clock(there, cfg.gpu, known).quick() / tokens, number, name, there))
    heapq.heapify(ordered)
    compared, found, room = len(ordered), [], SPECS[cfg.gpu].memory * cfg.estimate.memory
    while ordered and len(found) < 2 * SHOWN:  # the closed form behind the order is not what is shown: some more than needed
        _, _, name, one = heapq.heappop(ordered)
        worst = max(account(one), key=lambda rank: rank.memory.total)
        if worst.memory.total <= room:
            found.append(Found(one, name, speed(one, cfg.gpu), worst))
    return sorted(found, key=lambda f: -f.speed.tokens)[:SHOWN], compared


def _candidates(cfg: Config) -> Iterator[Config]:
    """Every layout of `gpus` that could hold the weights and gradients and that training would take."""
    assert cfg.gpus is not None and cfg.gpu is not None
    model, width, gpus = cfg.model, WIDTHS[cfg.precision.name], cfg.gpus
    (cards,) = cards_by_stage(model, [range(model.layers)])
    room = SPECS[cfg.gpu].memory * cfg.estimate.memory
    sizes = [n for n in range(1, gpus + 1) if gpus % n == 0]
    rows = [cfg.data.micro_batch_size] if cfg.data.micro_batch_size is not None else MICRO_BATCHES
    tensor = [n for n in sizes if n <= 8]
    context = [n for n in sizes if n == 1 or cfg.data.seq_length // n >= LEAST_STRETCH]
    expert = [n for n in range(1, gpus + 1) if model.moe.experts and model.moe.experts % n == 0] or [1]
    for pp, tp, cp in product([n for n in sizes if n <= model.layers + 2], tensor, context):
        if gpus % (pp * tp * cp):
            continue
        dp = gpus // (pp * tp * cp)
        for ep in expert:
            if (tp * cp * dp) % ep:
                continue
            held = sum(times * card.numel(tp=tp, ep=ep) for card, times in cards) // pp
            if held * (width + (max(4, width) if cfg.parallel.zero < 2 else 0)) > 1.2 * room:  # stages may be uneven
                continue
            for vpp, micro in product(VIRTUAL if pp > 1 else (1,), rows):
                layout = replace(cfg.parallel, tp=tp, sp=tp > 1, cp=cp, dp=dp, ep=ep, pp=pp, vpp=vpp)
                one = replace(cfg, parallel=layout, data=replace(cfg.data, micro_batch_size=micro))
                if not any(misfits(one, layout)):
                    yield one


def command(words: Sequence[str], found: Found) -> str:
    """What trains with a found layout: the typed words and the chosen sizes."""
    p = found.cfg.parallel
    kept = [word for word in words if word.split("=", 1)[0].split(".", 1)[0] not in ("gpu", "gpus", "search", "estimate")]
    sizes = [f"parallel.{axis}={shown(getattr(p, axis))}" for axis in ("tp", "cp", "dp", "ep", "pp", "vpp", "split")]
    chosen = [f"activations={found.activations}"] if found.activations else []
    if not any(word.startswith("data.micro_batch_size=") for word in words):
        chosen.append(f"data.micro_batch_size={found.cfg.data.micro_batch_size}")
    return " ".join(["k3 pretrain", *kept, *sizes, *chosen])
