"""`k3 estimate search=true gpus=N gpu=NAME`: the fastest layouts that fit, by the estimate, and the words that use one."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from hydra.core.override_parser.types import Override

from data.config import micro_batch, micro_batches
from k3 import memory
from k3.activations import OPTIONS, ActivationConfig
from k3.memory import Share
from optim.config import Offload
from optim.memory import state_bytes
from parallel.config import ParallelConfig, data_parallel_size, world_size
from parallel.in_flight import warmup_passes
from recipes.config import Config, Precision
from recipes.errors import UserError, shown
from recipes.gpus import SPECS, EstimateConfig
from recipes.memory import WIDTHS, RankMemory, account, cards_by_stage, replicas
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
    usual = EstimateConfig()
    changed = [f"estimate.{name}" for name, value in vars(cfg.estimate).items() if value != getattr(usual, name)]
    if cfg.gpu is None and (idle := next((key for key in changed), None)):
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
    ordered, bound, compared = [], _Bound(cfg), 0
    for one in _candidates(cfg):
        state = bound.state(one)
        for name, policy in policies.items():
            compared += 1
            there = replace(one, activations=policy)
            if state + bound.activations(there, name) <= bound.room:
                ordered.append((Clock(there, cfg.gpu, known).quick(), compared, name, there))
    heapq.heapify(ordered)
    found: list[Found] = []
    while ordered and len(found) < 2 * SHOWN:  # the closed form behind the order is not what is shown: some more than needed
        _, _, name, one = heapq.heappop(ordered)
        worst = max(account(one), key=lambda rank: rank.memory.total)
        if worst.memory.total <= bound.room:
            found.append(Found(one, name, speed(one, cfg.gpu), worst))
    return sorted(found, key=lambda f: -f.speed.tokens)[:SHOWN], compared


class _Bound:
    """A little less than the mean rank holds, from sums over the whole model: what does not fit by it need not be looked at."""

    def __init__(self, cfg: Config):
        assert cfg.gpu is not None
        self.room = SPECS[cfg.gpu].memory * cfg.estimate.memory
        self.width = WIDTHS[cfg.precision.name]
        (self.cards,) = cards_by_stage(cfg.model, [range(cfg.model.layers)])
        self._states: dict[tuple[object, ...], float] = {}
        self._saved: dict[tuple[object, ...], float] = {}

    def state(self, cfg: Config) -> float:
        """Of weights, gradients and optimizer."""
        p, width = cfg.parallel, self.width
        key = p.tp, p.ep, (p.dp or 1) * p.cp
        if key not in self._states:
            total = 0.0
            for card, times in self.cards:
                size = card.numel(tp=p.tp, ep=p.ep)
                part = size // replicas(card, p) if p.zero else size
                held = size * card.dtype.width(width) + (part if p.zero == 2 else size) * max(4, width)
                total += times * (held + (0 if cfg.optim.offload is Offload.cpu else state_bytes(card, part, cfg.optim, width)))
            self._states[key] = total
        return 0.98 * self._states[key] / p.pp

    def activations(self, cfg: Config, policy: str) -> float:
        """Of the micro-batches that the first rank holds in its layers."""
        p, of = cfg.parallel, cfg.parallel.dp or 1
        key = p.tp, p.cp, p.ep, micro_batch(cfg.data, of), policy
        if key not in self._saved:
            share = Share(micro_batch(cfg.data, of), cfg.data.seq_length, self.width, p)
            parts = [part for index in range(cfg.model.layers) for part in memory.layer(cfg.model, share, index)]
            self._saved[key] = memory.saved(parts, cfg.activations)
        count = micro_batches(cfg.data, of)
        passes = min(count * p.vpp, warmup_passes(p, 0, count) + 1)
        return 0.85 * passes * self._saved[key] / (p.pp * p.vpp)


def _candidates(cfg: Config) -> Iterator[Config]:
    """Every layout of `gpus` that training would take."""
    assert cfg.gpus is not None
    model, gpus = cfg.model, cfg.gpus
    sizes = [n for n in range(1, gpus + 1) if gpus % n == 0]
    rows = [cfg.data.micro_batch_size] if cfg.data.micro_batch_size is not None else MICRO_BATCHES
    tensor = [n for n in sizes if n <= 8]
    context = [n for n in sizes if n == 1 or cfg.data.seq_length // n >= LEAST_STRETCH]
    expert = [n for n in sizes if model.moe.experts and model.moe.experts % n == 0] or [1]
    for pp, tp, cp, ep in product([n for n in sizes if n <= model.layers], tensor, context, expert):
        dp, rest = divmod(gpus, pp * tp * cp)
        if rest or not dp or (tp * cp * dp) % ep:
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
