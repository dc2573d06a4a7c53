"""Bytes that one rank sends in a step, by parallel axis: what passes send, gradients, weights, Muon's matrices, balancing counts.

Conventions as in parallel/traffic.py. Left out: scalars (norms, losses, shapes of payloads) and whole matrices that Newton-Schulz
gathers over tensor ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from data.config import micro_batch, micro_batches
from k3 import traffic
from k3.config import Balance, K3Config
from k3.memory import Share
from optim.config import Distribution
from optim.table import assigned
from parallel.cards import Card, Group, Optimizer, TensorAxis
from parallel.config import ParallelConfig, sequence_parallel
from parallel.stages import group_size, split_layers
from recipes.config import Config
from recipes.memory import WIDTHS, cards_by_stage, replicas

AXES = ("tensor", "context", "expert", "pipeline", "gradients", "weights", "muon owners", "balancing")


@dataclass
class Exchanged:
    """Bytes of one pipeline rank (of its groups' average rank) in a step, by axis."""

    sent: dict[str, int] = field(default_factory=dict)
    # of "gradients" and "weights", what the expert parameters' replicas exchange: another group of ranks
    of_experts: dict[str, int] = field(default_factory=dict)

    def add(self, axis: str, count: int) -> None:
        if count:
            self.sent[axis] = self.sent.get(axis, 0) + count

    @property
    def total(self) -> int:
        return sum(self.sent.values())


def communication(cfg: Config) -> list[Exchanged]:
    """One entry a pipeline rank. `cfg` is checked and `parallel.dp` set."""
    layout, of = cfg.parallel, cfg.parallel.dp or 1
    count, width = micro_batches(cfg.data, of), WIDTHS[cfg.precision.name]
    share = Share(micro_batch(cfg.data, of), cfg.data.seq_length, width, layout)
    layers = split_layers(cfg.model.layers, layout)
    turns = -(-count // group_size(layout, count)) if layout.zero == 2 else 1  # of a virtual stage: each reduces its gradients
    by_stage = cards_by_stage(cfg.model, layers)
    out = []
    for rank in range(layout.pp):
        exchanged = Exchanged()
        for number in range(rank, len(layers), layout.pp):
            sent = traffic.stage(cfg.model, share, layers, number)
            for one in sent:
                exchanged.add("balancing" if one.axis == "all" else one.axis, count * (one.forward + one.backward))
            for one in traffic.again(sent, cfg.activations):
                exchanged.add(one.axis, count * one.forward)
            _parameters(exchanged, by_stage[number], cfg, width, turns)
            exchanged.add("balancing", _counts(cfg.model, layout, layers[number], number == len(layers) - 1))
        out.append(exchanged)
    if cfg.model.mtp_layers and layout.pp > 1:  # both ends hold the embedding: its gradient is summed over them
        (table,) = (card for card, _ in by_stage[0] if card.name == "embedding.weight")
        part = _part(table, layout) * max(4, width)
        for end in (out[0], out[-1]):
            end.add("pipeline", part)
    return out


def _part(card: Card, layout: ParallelConfig) -> int:
    """Elements that a rank updates."""
    size = card.numel(tp=layout.tp, ep=layout.ep)
    return -(-size // replicas(card, layout)) if layout.zero else size


def _parameters(out: Exchanged, cards: Sequence[tuple[Card, int]], cfg: Config, width: int, turns: int) -> None:
    layout, gradient = cfg.parallel, max(4, width)
    summed = {TensorAxis.REPLICATE_SUM} | ({TensorAxis.REPLICATE_SEQUENCE} if sequence_parallel(layout) else set())
    for card, times in cards:
        others, part = replicas(card, layout) - 1, times * _part(card, layout)
        if others:
            size = times * card.numel(tp=layout.tp, ep=layout.ep)
            reduced = part * gradient * others * turns if layout.zero else 2 * size * gradient * others // (others + 1)
            gathered = part * card.dtype.width(width) * others if layout.zero else 0
            for axis, count in (("gradients", reduced), ("weights", gathered)):
                out.add(axis, count)
                if card.placement.group is Group.EXPERT:
                    out.of_experts[axis] = out.of_experts.get(axis, 0) + count
            if layout.zero and assigned(card, cfg.optim).optimizer is Optimizer.MUON:
                # owners: at most the rank's part to them and as much back, which `k3 bench owners` holds against what is sent
                ways = 2 if cfg.optim.muon.distribution is Distribution.owners else others
                out.add("muon owners", ways * part * max(4, card.dtype.width(width)))
        if layout.tp > 1 and card.placement.tensor in summed:
            out.add("tensor", 2 * part * gradient * (layout.tp - 1) // layout.tp)


def _counts(model: K3Config, layout: ParallelConfig, layers: range, last: bool) -> int:
    """Loads of experts and, with quantile balancing, their histograms: one all-reduce over the ranks that hold other tokens."""
    ranks = layout.tp * layout.cp * (layout.dp or 1)
    moe = sum(model.is_moe(i) for i in layers) + (model.mtp_layers if last and model.moe.experts else 0)
    bins = model.moe.bins if model.moe.balance is Balance.quantile else 0
    return 2 * moe * model.moe.experts * (8 + 4 * bins) * (ranks - 1) // ranks
