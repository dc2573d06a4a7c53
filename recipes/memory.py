"""What a layout takes on each pipeline rank, from shapes alone: weights, gradients, optimizer state, saved activations, buffers.

The figures are for one rank of the tensor, context, expert and data axes. Not in them: what one operator needs while it runs, the
optimizer step's temporaries (Newton-Schulz above all), the allocator's and the libraries' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from data.config import micro_batch, micro_batches
from k3 import memory as activations
from k3.cards import describe
from k3.config import K3Config
from k3.layout import holder
from k3.memory import Share
from k3.qat import Qat
from optim.config import Offload
from optim.memory import state_bytes
from parallel.cards import Card, Group, Optimizer
from parallel.config import ParallelConfig
from parallel.in_flight import held_at_peak
from parallel.stages import split_layers, stage_count
from recipes.config import Config, Precision

WIDTHS = {Precision.fp32: 4, Precision.bf16: 2, Precision.fp64: 8}
WIDTHS |= {Precision.fp8: 2, Precision.mxfp8: 2}  # parameters are bf16; what is saved quantised takes less than is counted


@dataclass(frozen=True)
class Memory:
    """Bytes of one stage, or of all stages of a rank together. Activations are those at the rank's peak."""

    parameters: int  # a count
    weights: int
    gradients: int
    optimizer: int
    activations: int  # saved by layers, of all micro-batches in flight
    rows: int  # of Attention Residuals that came from other ranks, as the next of all micro-batches in flight
    loss: int  # head and probabilities; logits or their gradient for a moment
    again: int  # what the largest recomputed layer or half saves for a moment while its backward pass runs
    balancing: int  # counts that even out the experts' loads
    buffers: int  # payloads, the largest parameter's gradient before it is added up, what expert dispatch holds, rounded weights
    offloaded: int  # in CPU memory: the optimizer's with optim.offload=cpu, gradients with parallel.offload_gradients

    @property
    def total(self) -> int:
        """On the device."""
        state = self.weights + self.gradients + self.optimizer + self.balancing + self.buffers
        return state + self.activations + self.rows + self.loss + self.again


@dataclass(frozen=True)
class StageMemory:
    number: int
    rank: int
    layers: range
    per_micro_batch: int  # saved, rows and head included
    in_flight: int  # micro-batches held when the rank's activations are largest
    memory: Memory


@dataclass(frozen=True)
class RankMemory:
    rank: int
    stages: tuple[StageMemory, ...]
    memory: Memory


@dataclass(frozen=True)
class _State:
    """Of the trained parameters of one stage, in bytes."""

    parameters: int = 0
    weights: int = 0
    gradients: int = 0
    shard: int = 0  # of the gradients, what the rank updates
    optimizer: int = 0
    offloaded: int = 0
    largest: int = 0  # parameter
    rounded: int = 0  # what qat=mxfp4 keeps of weights while a step's passes run, in the model's dtype


def account(cfg: Config, *, documents: int = 2) -> list[RankMemory]:
    """One entry a pipeline rank. `cfg` is checked and `parallel.dp` set; precision must be one of WIDTHS.

    documents: in a sequence; packed ones, from 2 on, take masks.
    """
    layout, data = cfg.parallel, cfg.data
    of = layout.dp or 1
    width = WIDTHS[cfg.precision.name]
    layers = split_layers(cfg.model.layers, layout)
    share = Share(micro_batch(data, of), data.seq_length, width, layout, documents)
    states = _states(cfg, layers, width)
    parts = [activations.stage(cfg.model, share, layers, number) for number in range(stage_count(layout))]
    ranks = []
    for rank in range(layout.pp):
        numbers = range(rank, len(parts), layout.pp)
        costs = [activations.saved(parts[n], cfg.activations) for n in numbers]
        held = held_at_peak(layout, rank, micro_batches(data, of), costs)
        stages = []
        for number, cost, count in zip(numbers, costs, held):
            state, last = states[number], number == len(parts) - 1
            own = {role: [p for p in parts[number] if p.role == role] for role in ("rows", "head")}
            by = {role: activations.saved(of_role, cfg.activations) for role, of_role in own.items()}
            memory = Memory(
                parameters=state.parameters,
                weights=state.weights,
                gradients=state.gradients if layout.zero < 2 else _kept(layout, state),  # ZeRO-2's buffers are the rank's
                optimizer=state.optimizer,
                activations=(cost - by["rows"] - by["head"]) * count,
                rows=by["rows"] * count,
                loss=by["head"] * count + (activations.passing(cfg.model, share, cfg.activations) if last else 0),
                again=activations.rerun(parts[number], cfg.activations),
                balancing=activations.balancing(cfg.model, share, layers[number], last=last),
                buffers=activations.payloads(cfg.model, share, layers, number)
                + activations.standing(cfg.model, share, layers[number], last=last)
                + state.largest
                + state.rounded,
                offloaded=state.offloaded,
            )
            stages.append(StageMemory(number, rank, layers[number], cost, count, memory))
        ranks.append(RankMemory(rank, tuple(stages), _together(cfg, layers, share, stages, states)))
    return ranks


def _together(cfg: Config, layers: list[range], share: Share, stages: list[StageMemory], states: list[_State]) -> Memory:
    """The stages of a rank: sums, but only one of them runs at a time, and ZeRO-2's buffers are shared."""
    own, each = [states[s.number] for s in stages], [s.memory for s in stages]
    totals = {name: sum(getattr(m, name) for m in each) for name in vars(each[0])}
    totals["gradients"] = _gradients(cfg.parallel, own)
    payloads = [activations.payloads(cfg.model, share, layers, s.number) for s in stages]
    alone = [payload + state.largest for payload, state in zip(payloads, own)]
    totals["buffers"] += max(alone) - sum(alone)
    totals["again"] = max(m.again for m in each)
    return Memory(**totals)


def _gradients(layout: ParallelConfig, states: list[_State]) -> int:
    """Accumulated gradients in float32 (float64 of a float64 model).

    ZeRO-2: the rank's part, and two buffers as large as its largest stage; with offload_gradients the part lies in CPU memory.
    """
    if layout.zero < 2:
        return sum(state.gradients for state in states)
    return 2 * max(state.gradients for state in states) + sum(_kept(layout, state) for state in states)


def _kept(layout: ParallelConfig, state: _State) -> int:
    return 0 if layout.offload_gradients else state.shard


def _states(cfg: Config, layers: list[range], width: int) -> list[_State]:
    return [_state(cards, cfg, cfg.parallel, width) for cards in cards_by_stage(cfg.model, layers)]


_described: dict[str, dict[str, list[Card]]] = {}  # by model: parts that a stage may hold -> their trained parameters


def cards_by_stage(model: K3Config, layers: Sequence[range]) -> list[list[tuple[Card, int]]]:
    """The trained parameters of every stage, those of like layers once, with how many times they are there."""
    parts = _described.setdefault(repr(model), {})
    if not parts:
        for card in describe(model).values():
            if card.optimizer is not Optimizer.BALANCE:
                part, _, rest = card.name.partition(".")
                parts.setdefault(f"{part}.{rest.partition('.')[0]}" if part == "layers" else part, []).append(card)
    stages_of, out = holder(model, layers), []
    for held in layers:
        counts: dict[tuple[bool, bool], list[int]] = {}
        for index in held:
            counts.setdefault((model.is_mla(index), model.is_moe(index)), []).append(index)
        out.append([(card, len(alike)) for alike in counts.values() for card in parts[f"layers.{alike[0]}"]])
    for part, cards in parts.items():
        if not part.startswith("layers."):
            for number in stages_of(f"{part}."):
                out[number] += [(card, 1) for card in cards]
    return out


def replicas(card: Card, layout: ParallelConfig) -> int:
    """How many ranks hold the same part of a parameter."""
    dense = (layout.dp or 1) * layout.cp
    return dense * layout.tp // layout.ep if card.placement.group is Group.EXPERT else dense


def _state(cards: Sequence[tuple[Card, int]], cfg: Config, layout: ParallelConfig, width: int) -> _State:
    gradient = max(4, width)
    total = dict.fromkeys(vars(_State()), 0)
    for card, times in cards:
        count = card.numel(tp=layout.tp, ep=layout.ep)
        # evenly over the ranks: each bucket of parameters is cut so, up to its padding
        part = -(-count // replicas(card, layout)) if layout.zero else count
        total["parameters"] += times * count
        total["weights"] += times * count * card.dtype.width(width)
        total["gradients"] += times * count * gradient
        total["shard"] += times * part * gradient
        place = "offloaded" if cfg.optim.offload is Offload.cpu else "optimizer"
        total[place] += times * state_bytes(card, part, cfg.optim, width)
        total["offloaded"] += times * part * gradient if layout.offload_gradients else 0
        if card.quantise and cfg.qat.name is not Qat.none:
            total["rounded"] += times * count * card.dtype.width(width)
        total["largest"] = max(total["largest"], count * card.dtype.width(width))
    return _State(**total)
