"""Seconds of a step on a named GPU: a roofline of each stage's passes, the simulated pipeline, and what the update takes.

A pass of a stage is the sum of its products, each at the peak times the assumed efficiency of its kind (experts: at least the
time to read their weights), of its elementwise work, as memory traffic in proportion to what the stage would save, and of the
collectives inside it. Assumptions are the keys of `recipes.gpus.EstimateConfig`; nothing here is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from data.config import micro_batch, micro_batches
from k3 import flops, memory, traffic
from k3.memory import Share
from optim.config import MuonPrecision
from optim.memory import state_bytes
from optim.work import step_flops
from parallel.cards import Card, Group
from parallel.config import ParallelConfig, world_size
from parallel.simulate import Played, play
from parallel.stages import bubble, split_layers
from recipes.communication import Exchanged, communication
from recipes.config import Config, Precision
from recipes.gpus import SPECS, EstimateConfig, Gpu, GpuSpec
from recipes.memory import WIDTHS, cards_by_stage, replicas

DENSE = ("projections", "dense", "shared", "latent", "router", "head")


@dataclass(frozen=True)
class Speed:
    step: float  # seconds
    pipeline: float  # of them forward and backward passes, waiting included,
    bubble: float  # the share of these in which the average pipeline rank waits
    gradients: float  # seconds that the last reduction of gradients outlives the passes,
    update: float  # of the optimizer,
    weights: float  # and of the gathering of weights
    collectives: float  # seconds of the pipeline's slowest rank that are tensor, context and expert collectives
    tokens: float  # a second and GPU
    mfu: float  # useful operations over the peak of all GPUs
    peak: float


def peak(gpu: GpuSpec, precision: Precision) -> float:
    """Operations a second of products in a model of this precision."""
    return gpu.bf16 if precision is Precision.bf16 else gpu.fp32


class Fabric:
    """How fast the groups of a layout's axes talk: ranks lie tensor first, then context, data and pipeline."""

    def __init__(self, layout: ParallelConfig, gpu: GpuSpec, assumed: EstimateConfig):
        self.gpu, self.assumed = gpu, assumed
        inner, dense = layout.tp, (layout.dp or 1) * layout.cp
        self.groups = {  # axis: (ranks, distance of neighbours)
            "tensor": (layout.tp, 1),
            "context": (layout.cp, inner),
            "expert": (layout.ep, 1),
            "dense": (dense, inner),
            "replicas": (dense * inner // layout.ep, layout.ep),
            "pipeline": (2, dense * inner),
            "all": (dense * inner, 1),
        }

    def seconds(self, axis: str, sent: float, collectives: float = 1) -> float:
        """For `sent` bytes of one rank: the links inside a domain and the network beside them, at the same time."""
        ranks, stride = self.groups[axis]
        if not sent or ranks == 1:
            return 0.0
        near = max(1, min(ranks, self.gpu.domain // stride))
        inside = (near - 1) / (ranks - 1)
        time = max(sent * inside / self.gpu.link, sent * (1 - inside) / self.gpu.network)
        return time / self.assumed.bandwidth + collectives * self.assumed.latency


@dataclass(frozen=True)
class Passes:
    """Seconds of one micro-batch in a stage, and of them those of collectives."""

    forward: float
    backward: float
    collectives: float


Known = dict[tuple[object, ...], Passes]


class Clock:
    """Times stages of one layout; layers alike are timed once, for all clocks that share `known`."""

    def __init__(self, cfg: Config, gpu: Gpu, known: Known | None = None):
        self.cfg, self.gpu, self.assumed = cfg, SPECS[gpu], cfg.estimate
        layout, of = cfg.parallel, cfg.parallel.dp or 1
        self.width = WIDTHS[cfg.precision.name]
        self.share = Share(micro_batch(cfg.data, of), cfg.data.seq_length, self.width, layout)
        self.layers = split_layers(cfg.model.layers, layout)
        self.fabric = Fabric(layout, self.gpu, self.assumed)
        self.top = peak(self.gpu, cfg.precision.name)
        self.rates = {kind: self.top * self.assumed.matmul for kind in DENSE}
        self.rates |= {kind: self.top * getattr(self.assumed, kind) for kind in ("experts", "attention", "kda")}
        self._known = {} if known is None else known
        # all that a layer's passes depend on beside the model, the length, precision and GPU
        self._key = (layout.tp, layout.sp, layout.cp, layout.ep, self.share.rows, *map(repr, vars(cfg.activations).values()))

    def stages(self) -> list[Passes]:
        return [self._stage(number) for number in range(len(self.layers))]

    def _stage(self, number: int) -> Passes:
        """A stage is its layers, and what its first and last positions add: timed as a stage without layers."""
        c, held = self.cfg.model, self.layers[number]
        ends = (*self._key, number == 0, number == len(self.layers) - 1)
        if ends not in self._known:
            bare = [range(of.stop, of.stop) if i == number else of for i, of in enumerate(self.layers)]
            self._known[ends] = self._time(bare, number)
        parts = [self._known[ends]]
        for index in held:
            sources = index // c.residual_block, -(-index // c.residual_block)
            key = (*self._key, c.is_mla(index), c.is_moe(index), *sources)
            if key not in self._known:
                work, sent = flops.layer(c, self.share, index), traffic.layer(c, self.share, index)
                saved = memory.saved(memory.layer(c, self.share, index))
                self._known[key] = self._sum(work, sent, saved, c.is_moe(index))
            parts.append(self._known[key])
        return Passes(*(sum(getattr(part, name) for part in parts) for name in ("forward", "backward", "collectives")))

    def _time(self, layers: Sequence[range], number: int) -> Passes:
        c = self.cfg.model
        sent = [one for one in traffic.stage(c, self.share, layers, number) if one.axis != "pipeline"]
        last = number == len(layers) - 1
        # rows that arrived are kept for the layers that read them, which count that
        kept = [part for part in memory.stage(c, self.share, layers, number) if part.role != "rows"]
        saved = memory.saved(kept)
        return self._sum(flops.stage(c, self.share, layers, number), sent, saved, bool(last and c.mtp_layers and c.moe.experts))

    def _sum(self, work: Sequence[flops.Work], sent: Sequence[traffic.Sent], saved: int, experts: bool) -> Passes:
        """Of parts of a stage that would save `saved` bytes if they kept everything."""
        memory_rate = self.gpu.hbm * self.assumed.bandwidth
        again = flops.again(work, self.cfg.activations)
        repeated = sum(w.forward for w in again) / max(1, sum(w.forward for w in work))
        touched = saved * self.assumed.touches / memory_rate
        ahead = sum(self._product(w.kind, w.forward) for w in work) + touched
        back = sum(self._product(w.kind, w.backward) for w in work) + 2 * touched
        back += sum(self._product(w.kind, w.forward) for w in again) + touched * repeated
        if experts:  # few tokens an expert: weights have to be read, and gradients added up in float32, all the same
            read = self._expert_weights() * self.width / memory_rate
            added = self._expert_weights() * (2 * self.width + 2 * max(4, self.width)) / memory_rate
            products = [w for w in work if w.kind == "experts"]
            ahead += max(0.0, read - sum(self._product(w.kind, w.forward) for w in products))
            back += max(0.0, read + added - sum(self._product(w.kind, w.backward) for w in products))
        on = sum(self._collective(one, one.forward) for one in sent)
        returned = sum(self._collective(one, one.backward) for one in sent)
        returned += sum(self._collective(one, one.forward) for one in traffic.again(sent, self.cfg.activations))
        return Passes(ahead + on, back + returned, on + returned)

    def _product(self, kind: str, operations: int) -> float:
        if kind == "mixing":
            return 0.0  # elementwise: in what memory traffic stands for
        return operations / self.rates[kind] * (self.assumed.imbalance if kind == "experts" else 1.0)

    def _collective(self, one: traffic.Sent, count: int) -> float:
        time = self.fabric.seconds(one.axis, count)
        return time * self.assumed.imbalance * (1 - self.assumed.hidden) if one.axis == "expert" else time

    def _expert_weights(self) -> int:
        c = self.cfg.model
        return c.moe.experts // self.cfg.parallel.ep * 3 * c.expert_width * c.moe.expert_size

    def play(self) -> tuple[Played, list[Passes]]:
        """The step's passes through megatron-core's schedule."""
        stages, of = self.stages(), self.cfg.parallel.dp or 1
        sent = max(flops.travelling(self.cfg.model, self.share, self.layers, n) for n in range(len(stages)))
        hop = self.fabric.seconds("pipeline", sent) if self.cfg.parallel.pp > 1 else 0.0
        times = [stage.forward for stage in stages], [stage.backward for stage in stages]
        return play(self.cfg.parallel, micro_batches(self.cfg.data, of), *times, hop), stages

    def quick(self) -> float:
        """A step's passes by the closed form of even stages: a stand-in for `play` while many layouts are compared."""
        stages, layout = self.stages(), self.cfg.parallel
        count = micro_batches(self.cfg.data, layout.dp or 1)
        slowest = max(sum(s.forward + s.backward for s in stages[rank :: layout.pp]) for rank in range(layout.pp))
        return count * slowest / (1 - bubble(layout, count))


def speed(cfg: Config, gpu: Gpu, exchanged: Sequence[Exchanged] | None = None) -> Speed:
    """`cfg` is checked and `parallel.dp` set; its precision is one of WIDTHS."""
    clock, layout = Clock(cfg, gpu), cfg.parallel
    played, stages = clock.play()
    every = exchanged or communication(cfg)
    last = [max(s.backward for s in stages[rank :: layout.pp]) for rank in range(layout.pp)]
    by_stage = cards_by_stage(cfg.model, clock.layers)
    exposed = update = weights = 0.0
    for rank, sent in enumerate(every):
        reduced = _replicated(clock.fabric, sent, "gradients")
        # megatron-core reduces the buckets of the last micro-batch's backward pass while it runs; ZeRO-2 also earlier ones
        exposed = max(exposed, reduced - last[rank] if layout.overlap else reduced)
        cards = [card for number in range(rank, len(by_stage), layout.pp) for card in by_stage[number]]
        owners = clock.fabric.seconds("dense", sent.sent.get("muon owners", 0))
        update = max(update, _update(cards, cfg, clock), owners)
        weights = max(weights, _replicated(clock.fabric, sent, "weights"))
    count = micro_batches(cfg.data, layout.dp or 1)
    collectives = max(count * sum(s.collectives for s in stages[rank :: layout.pp]) for rank in range(layout.pp))
    step = played.time + exposed + update + weights
    tokens, gpus = cfg.data.batch_size * cfg.data.seq_length, world_size(layout)
    useful = sum(flops.per_token(cfg.model, cfg.data.seq_length).values())
    rate = tokens / step / gpus
    return Speed(
        step, played.time, played.bubble, exposed, update, weights, collectives, rate, rate * useful / clock.top, clock.top
    )


def _replicated(fabric: Fabric, sent: Exchanged, axis: str) -> float:
    """Dense parameters over data and context ranks, experts over theirs, one after the other."""
    all_of, experts = sent.sent.get(axis, 0), sent.of_experts.get(axis, 0)
    return fabric.seconds("dense", all_of - experts) + fabric.seconds("replicas", experts)


def _update(cards: Sequence[tuple[Card, int]], cfg: Config, clock: Clock) -> float:
    """Newton-Schulz spread evenly over owners, and masters, moments and gradients read and written once."""
    layout, gpu, width = cfg.parallel, clock.gpu, clock.width
    operations = bytes_ = 0.0
    for card, times in cards:
        ranks = layout.ep if card.placement.group is Group.EXPERT else card.numel() // card.numel(tp=layout.tp)
        over = ranks * (replicas(card, layout) if layout.zero else 1)
        part = card.numel() // over
        operations += times * step_flops(card, cfg.optim) / over
        bytes_ += times * (2 * state_bytes(card, part, cfg.optim, width) + part * (max(4, width) + card.dtype.width(width)))
    rate = gpu.bf16 if cfg.optim.muon.precision is MuonPrecision.bf16 else gpu.fp32
    return operations / (rate * cfg.estimate.matmul) + bytes_ / (gpu.hbm * cfg.estimate.bandwidth)
