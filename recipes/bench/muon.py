"""`k3 bench muon`: what cutting attention into heads does to the update, and what a Muon step costs beside the other Muons.

All sides train the same logical matrices (the others get each as a parameter of its own) from the same gradients with momentum
0.95, Nesterov and five quintic steps, take turns, and end at the same weights, which is checked. Ratios are medians over rounds
of two neighbouring times, so that a machine which slows down slows both.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import k3
import optim
from k3.cards import describe
from k3.config import K3Config
from optim.config import MuonConfig, MuonPrecision, Offload, OptimConfig
from optim.home import Home
from optim.muon import Muon
from optim.table import assign, assigned
from parallel.cards import Blocks, Card, CardTable, Optimizer, Placement, Published, TensorAxis, heads
from parallel.shards import Shards
from recipes.console import say
from recipes.summary import versions

SCALES = (1000.0, 1.0, 1.0, 1.0)  # of the heads' gradients
HEAD_ROWS, WIDTH = 32, 256
EXPERTS = 8  # of a layer's 64: those of all layers together would take minutes
SECONDS, ROUNDS = 12.0, 9  # of one comparison: no round begins after so long, but for the first, and none after so many
LR, DECAY = 1e-3, 0.1
TOLERANCE = {MuonPrecision.full: 1e-4, MuonPrecision.bf16: 0.1}  # relative, of the update


def run() -> None:
    """Prints both parts."""
    say(", ".join(f"{name} {value}" for name, value in versions().items()))
    say(f"update RMS of heads whose momenta are {' : '.join(f'{scale:g}' for scale in SCALES)}, learning rate 1")
    for per_head in (True, False):
        rms = head_rms(per_head)
        spread = max(rms) / min(rms) - 1
        say(f"  {_mode(per_head):<13} {'  '.join(f'{x:.4f}' for x in rms)}   largest over smallest: +{100 * spread:.1f} %")
    precisions = [MuonPrecision.full, MuonPrecision.bf16]
    if (times := half_against_full()) > 1:
        precisions.remove(MuonPrecision.bf16)
        say(f"bf16 products left out: this machine has no units for them, and they take {times:.0f} times as long as float32's")
    slow: set[str] = set()  # sides of which one step took longer than a whole comparison should: left out of what is larger
    for title, cards in parameter_sets(k3.preset("small")).items():
        elements = sum(math.prod(card.shape) for card in cards)
        say(f"{title}: {len(cards)} parameters, {elements:,} elements")
        for precision in precisions:
            rows = compare(cards, precision, leave_out=slow)
            say(f"  {_products(precision)} products, medians of {max(len(row['per_round']) for row in rows)} rounds")
            for why in refusals(precision):
                say(f"    {why}")
            slow |= {row["name"] for row in rows if row["seconds"] > SECONDS}
            for row in rows:
                say(f"    {row['name']:<36} {1e3 * row['seconds']:9.1f} ms" + _beside(row, rows))


def half_against_full(size: int = 512) -> float:
    """How many times as long a product in bf16 takes as one in float32: below 1 where the machine has units for it."""
    taken = []
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(size, size, dtype=dtype)
        x @ x
        before = time.perf_counter()
        x @ x
        taken.append(time.perf_counter() - before)
    return taken[1] / taken[0]


def head_rms(per_head: bool) -> list[float]:
    """RMS of each head's update for learning rate 1, from one momentum of four heads of SCALES."""
    gradient = torch.randn(len(SCALES), HEAD_ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    gradient *= torch.tensor(SCALES).view(-1, 1, 1)
    weight = nn.Parameter(torch.zeros(len(SCALES) * HEAD_ROWS, WIDTH))
    weight.grad = gradient.view_as(weight)
    cards = CardTable({"q": _card("q", weight, heads(("query", HEAD_ROWS)))}, {"q": weight})
    cfg = OptimConfig(lr=1.0, weight_decay=0.0, grad_clip=0.0, muon=MuonConfig(per_head=per_head))
    cfg.schedule.warmup = 0.0
    optim.build(cfg, cards, steps=1).step()
    return weight.detach().view(len(SCALES), -1).square().mean(1).sqrt().tolist()


def _card(name: str, weight: Tensor, blocks: Blocks) -> Card:
    shape = tuple(weight.shape)
    place = Placement(TensorAxis.ROWS)
    return Card(name, (Published(name),), shape, blocks, place, Optimizer.MUON, decay=True, role="attention")


def parameter_sets(model: K3Config) -> dict[str, list[Card]]:
    """Muon's parameters of one KDA and one MLA layer: those that are cut into heads, and all, with EXPERTS experts."""
    few = min(EXPERTS, model.moe.experts)
    moe = dataclasses.replace(model.moe, experts=few, top_k=min(model.moe.top_k, few - 1))
    cards = [card for card in describe(dataclasses.replace(model, moe=moe)).values()]
    cards = [card for card in cards if assigned(card, OptimConfig()).optimizer is Optimizer.MUON]
    mla = next(card.name for card in cards if card.name.endswith("kv_b_proj.weight")).split(".")[1]
    layers = [card for card in cards if card.name.split(".")[:2] in (["layers", "1"], ["layers", mla])]
    names = f"layers 1 (KDA) and {mla} (MLA)"
    return {
        f"attention projections of {names}": [card for card in layers if card.blocks.per_head],
        f"all matrices of {names}, {few} of {model.moe.experts} experts": [
            card for card in layers if card.name.split(".")[1] == "1" or ".attention." in card.name
        ],
    }


@dataclass(frozen=True)
class Side:
    """One optimizer at work on its own copy of the weights."""

    name: str
    ours: bool
    comparable: bool  # ends at the weights that our whole-matrix Muon ends at
    step: Callable[[], object]
    weights: dict[str, list[Tensor]]  # by parameter, its logical matrices in one order on all sides


def compare(
    cards: Sequence[Card], precision: MuonPrecision, seconds: float = SECONDS, leave_out: Set[str] = frozenset()
) -> list[dict[str, Any]]:
    """Median seconds of a step of every side, ours first; `per_round` keeps all. Raises RuntimeError where weights differ.

    Of a side whose first step takes longer than `seconds` that one counts.
    """
    generator = torch.Generator().manual_seed(0)
    start = {c.name: 0.02 * torch.randn(c.shape, generator=generator) for c in cards}
    gradients = {c.name: torch.randn(c.shape, generator=generator) for c in cards}
    sides = [_ours(cards, start, gradients, precision, per_head) for per_head in (True, False)]
    sides += [side for side in _others(cards, start, gradients, precision) if side.name not in leave_out]
    with torch.compiler.set_stance("force_eager"):  # DeepSpeed's is compiled else, for a minute and little gain on CPUs
        return _timed(cards, start, sides, precision, seconds)


def _timed(
    cards: Sequence[Card], start: dict[str, Tensor], sides: Sequence[Side], precision: MuonPrecision, seconds: float
) -> list[dict[str, Any]]:
    taken: dict[str, list[float]] = {side.name: [] for side in sides}
    for side in sides:  # the first step warms up and shows that all do the same
        before = time.perf_counter()
        side.step()
        if (first := time.perf_counter() - before) > seconds:
            taken[side.name].append(first)
    _check(cards, start, sides, TOLERANCE[precision])

    quick = [side for side in sides if not taken[side.name]]
    began = time.perf_counter()
    for turn in range(ROUNDS):
        if turn and time.perf_counter() - began > seconds:
            break
        for side in quick:
            before = time.perf_counter()
            side.step()
            taken[side.name].append(time.perf_counter() - before)
    return [
        {"name": s.name, "ours": s.ours, "seconds": statistics.median(taken[s.name]), "per_round": taken[s.name]} for s in sides
    ]


def ratio(row: dict[str, Any], to: dict[str, Any]) -> float:
    """How many times as long a step of `to` takes as one of `row`: the median over rounds."""
    return statistics.median(b / a for a, b in zip(row["per_round"], to["per_round"]))


def best_other(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return min((row for row in rows if not row["ours"]), key=lambda row: row["seconds"])


def refusals(precision: MuonPrecision) -> list[str]:
    """Which of the other implementations cannot be measured here, and why."""
    out = []
    if precision is MuonPrecision.full:
        out.append("torch.optim.Muon left out: its products are half precision, whatever is asked for")
    if find_spec("deepspeed") is None:
        out.append('DeepSpeed left out: it is not installed (EXTRAS="test deepspeed" make install)')
    elif not _deepspeed_methods(precision):
        out.append("DeepSpeed left out: none of its iterations has products of this precision here")
    return out


def _ours(
    cards: Sequence[Card], start: dict[str, Tensor], gradients: dict[str, Tensor], precision: MuonPrecision, per_head: bool
) -> Side:
    weights = {name: tensor.clone() for name, tensor in start.items()}
    table = CardTable({c.name: c for c in cards}, dict(weights))
    cfg = MuonConfig(per_head=per_head, precision=precision)
    rows = assign(table, OptimConfig(muon=cfg)).of(Optimizer.MUON)
    shards = Shards.whole(table)
    muon = Muon(cfg, rows, weights, shards, Home(Offload.none, shards.device))

    def step() -> object:
        return muon.step(weights, gradients, lr=LR, decay=DECAY, scale=1.0)

    return Side(f"k3 {_mode(per_head)}", True, not per_head, step, {c.name: _logical(c, weights[c.name]) for c in cards})


def _others(
    cards: Sequence[Card], start: dict[str, Tensor], gradients: dict[str, Tensor], precision: MuonPrecision
) -> Iterable[Side]:
    from emerging_optimizers.orthogonalized_optimizers.muon import Muon as EmergingMuon

    def side(name: str, comparable: bool, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Side:
        parameters = {c.name: [nn.Parameter(m.clone()) for m in _logical(c, start[c.name])] for c in cards}
        for card in cards:
            for parameter, gradient in zip(parameters[card.name], _logical(card, gradients[card.name])):
                parameter.grad = gradient.clone()
        optimizer = make([p for of in parameters.values() for p in of])
        return Side(name, False, comparable, optimizer.step, {n: list(of) for n, of in parameters.items()})

    products = "highest" if precision is MuonPrecision.full else "medium"
    yield side(
        "emerging-optimizers Muon",
        True,
        lambda parameters: EmergingMuon(
            parameters,
            LR,
            0.95,
            DECAY,
            nesterov=True,
            coefficient_type="simple",
            fp32_matmul_prec=products,
            extra_scale_factor=0.2,
        ),
    )
    if precision is MuonPrecision.bf16:
        yield side(
            "torch.optim.Muon",
            True,
            lambda parameters: torch.optim.Muon(
                parameters, lr=LR, weight_decay=DECAY, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw"
            ),
        )
    if find_spec("deepspeed") is not None:
        theirs = _deepspeed()
        for method in _deepspeed_methods(precision):
            # its update has another scale, and it overwrites the gradients it is given: its speed alone is compared
            make = partial(theirs.SingleDeviceMuon, lr=LR, weight_decay=DECAY, ns_method=method)
            yield side(f"DeepSpeed Muon ({method})", False, make)


def _deepspeed() -> Any:
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it warns that it found none
    return importlib.import_module("deepspeed.runtime.zero.muon.original_muon")


def _deepspeed_methods(precision: MuonPrecision) -> list[str]:
    """Those of its iterations whose products have this precision here: it chooses by method and device."""
    half = precision is MuonPrecision.bf16
    return [m for m in ("standard", "gram") if (_deepspeed().ns_compute_dtype(m).itemsize == 2) == half]


def _logical(card: Card, tensor: Tensor) -> list[Tensor]:
    """The matrices that whole-matrix Muon orthogonalises: heads together; experts, gate and up apart. Views."""
    blocks = card.blocks
    parts = blocks.whole(tensor) if blocks.per_head else blocks.views(tensor)
    return [matrix for _, stack in parts for matrix in stack]


def _check(cards: Sequence[Card], start: dict[str, Tensor], sides: Sequence[Side], tolerance: float) -> None:
    want, *others = [side for side in sides if side.comparable]
    for card in cards:
        before = _logical(card, start[card.name])
        for side in others:
            for first, ours, theirs in zip(before, want.weights[card.name], side.weights[card.name]):
                error = float((theirs.detach() - ours).norm() / (ours - first).norm())
                if not error <= tolerance:
                    raise RuntimeError(
                        f"bench muon: {card.name}: {side.name} and {want.name} differ by {error:.1e} of the update"
                    )


def _beside(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    if not row["ours"]:
        return ""
    best = best_other(rows)
    return f"   {ratio(row, best):.2f}x as fast as {best['name']}"


def _mode(per_head: bool) -> str:
    return "per head" if per_head else "whole matrix"


def _products(precision: MuonPrecision) -> str:
    return "float32" if precision is MuonPrecision.full else "bf16"


if __name__ == "__main__":
    run()
