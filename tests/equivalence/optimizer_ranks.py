"""What each rank of `test_optimizer.py` does: a model of cards of every kind inside megatron-core's buffers, and its optimizer.

Every value of the model and every gradient is drawn whole, by name; a rank takes its share. So a single process can be given the
same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import k3
import optim
import parallel
from k3.backend import megatron_config
from k3.init import shard
from optim.config import Distribution, MuonConfig, OptimConfig, OptimizerName, WeightClipConfig
from optim.exchange import Exchange, Pending
from optim.muon import Muon
from optim.optimizer import Optimizer, StepReport
from parallel.attributes import mark
from parallel.cards import (
    Blocks,
    Card,
    CardTable,
    DType,
    Group,
    Placement,
    Published,
    TensorAxis,
    fused,
    heads,
    not_a_matrix,
    whole,
)
from parallel.cards import Optimizer as Kind
from parallel.clip import ClipTarget
from parallel.config import ParallelConfig
from parallel.shards import Shard, Shards
from parallel.world import World
from tests.optim.cases import take_over

HEADS, WIDTH, EXPERTS = 4, 30, 4  # rows of 30: the cut's edges, at multiples of 64, fall inside rows too
QUERY, KEY_VALUE = "q.weight", "kv.weight"
ROWS, COLS = Placement(TensorAxis.ROWS), Placement(TensorAxis.COLS)
SUM, SAME, SEQUENCE = (Placement(TensorAxis[f"REPLICATE_{how}"]) for how in ("SUM", "SAME", "SEQUENCE"))
EXPERT = Placement(TensorAxis.REPLICATE_SAME, Group.EXPERT)
KINDS: dict[str, tuple[tuple[int, ...], Blocks, Placement, str]] = {  # name -> global shape, blocks, placement, role
    "embedding.weight": ((40, WIDTH), not_a_matrix(), ROWS, "embedding"),
    QUERY: ((HEADS * 8, WIDTH), heads(("query", 8)), ROWS, "attention"),
    KEY_VALUE: ((HEADS * 12, WIDTH), heads(("key", 8), ("value", 4)), ROWS, "attention"),
    "conv.weight": ((HEADS * 8, 4), not_a_matrix(), ROWS, "convolution"),
    "g.weight": ((64, WIDTH), whole(64), ROWS, "attention"),
    "o.weight": ((WIDTH, HEADS * 8), whole(WIDTH), COLS, "attention"),
    "fused.weight": ((24, 40), fused(("gate", 12), ("up", 12)), COLS, "dense"),
    "latent.weight": ((20, WIDTH), whole(20), SUM, "latent"),
    "router.weight": ((EXPERTS, WIDTH), whole(EXPERTS), SUM, "router"),
    "experts.gate_up": ((EXPERTS, 24, 30), fused(("gate", 12), ("up", 12), per_expert=True), EXPERT, "expert"),
    "experts.down": ((EXPERTS, 30, 12), whole(30, per_expert=True), EXPERT, "expert"),
    "mtp.weight": ((48, 96), whole(48), SAME, "mtp"),
    "norm.weight": ((WIDTH,), not_a_matrix(), SEQUENCE, "norm"),
    "scalar": ((1,), not_a_matrix(), SAME, "norm"),
}  # fmt: skip
BUCKET = 1500  # elements: edges of the cut fall into matrices, one matrix lies on all ranks
STEPS = 6
BAD, REFUSED = 2, 3  # the steps with a gradient that is not finite on one rank, with a loss that is not finite on another
RESUMED = 4  # the step before which a new optimizer takes over from the old one's state


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype = torch.float64
    optimizer: OptimizerName = OptimizerName.muon
    per_head: bool = True
    zero: int = 1
    distribution: Distribution = Distribution.owners

    def config(self) -> OptimConfig:
        muon = MuonConfig(per_head=self.per_head, distribution=self.distribution)
        return OptimConfig(name=self.optimizer, lr=0.01, muon=muon, clip=WeightClipConfig(tau=100.0))


def card(name: str) -> Card:
    shape, blocks, placement, role = KINDS[name]
    kind = Kind.MUON if blocks.is_matrix else Kind.ADAMW
    dtype = DType.FP32 if role == "convolution" else DType.MODEL
    return Card(name, (Published(name),), shape, blocks, placement, kind, blocks.is_matrix, dtype, role=role)


def cards_of(tensors: dict[str, nn.Parameter]) -> CardTable:
    return CardTable({name: card(name) for name in KINDS}, dict(tensors))


def dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    return card(name).dtype.resolve(dtype)


def drawn(seed: int) -> dict[str, Tensor]:
    """A whole value of every parameter, float64."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, (shape, *_) in KINDS.items()}


def logits_of(step: int) -> Tensor:
    """The largest attention logit of each head over all tokens: some above tau, none seen in the last head at first."""
    values = torch.tensor([150.0, 20.0, 400.0, 99.0]).roll(step) + step
    return torch.where(torch.arange(HEADS) == HEADS - 1, -torch.inf, values) if step == 0 else values


def target_of(heads_here: int) -> ClipTarget:
    return ClipTarget(QUERY, KEY_VALUE, nope=4, rope=4, value=8, max_logits=torch.full((heads_here,), -torch.inf))


def single(case: Case) -> dict[str, Any]:
    """The same training of the whole tensors, without any group or buffer."""
    tensors = {n: nn.Parameter(value.to(dtype_of(n, case.dtype))) for n, value in drawn(0).items()}
    target = target_of(HEADS)
    optimizer = optim.build(case.config(), cards_of(tensors), steps=STEPS, clip_targets=[target])
    reports = []
    for step in range(STEPS):
        gradients = drawn(100 + step)
        for name, p in tensors.items():
            p.main_grad = gradients[name].to(torch.float64 if case.dtype == torch.float64 else torch.float32)
        if step == BAD:
            tensors["g.weight"].main_grad[0, 0] = torch.nan
        target.max_logits.copy_(logits_of(step))
        reports.append(optimizer.step(finite=step != REFUSED))
    masters = {n: t.clone() for n, t in optimizer.masters.items()}
    return {"weights": {n: p.detach() for n, p in tensors.items()}, "masters": masters, "reports": reports}


class _Toy(nn.Module):
    def __init__(self, config: Any, tensors: dict[str, nn.Parameter]):
        super().__init__()
        self.config = config
        for name, p in tensors.items():
            self.register_parameter(name.replace(".", "_"), p)


def train(layout: ParallelConfig, cases: list[Case], broken: str = "") -> list[dict[str, Any]]:
    """What this rank ends with in each case."""
    world = parallel.start(layout)
    if broken:
        BREAK[broken]()
    return [_train(case, replace(world, config=replace(layout, zero=case.zero))) for case in cases]


def _train(case: Case, world: World) -> dict[str, Any]:
    groups = world.groups
    tensors = {n: nn.Parameter(_local(n, value, world).to(dtype_of(n, case.dtype))) for n, value in drawn(0).items()}
    cards = cards_of(tensors)
    mark(cards, world)
    model = parallel.wrap(_Toy(megatron_config(k3.preset("tiny"), world, case.dtype), tensors), cards, world)
    target = target_of(HEADS // groups.tp.size())

    def build() -> Optimizer:
        return optim.build(case.config(), cards, steps=STEPS, clip_targets=[target], shards=model.shards)

    optimizer, reports, restored = build(), [], False
    for step in range(STEPS):
        if step == RESUMED:
            state = {name: tensor.clone() for name, tensor in optimizer.state_dict().items()}
            weights = {name: p.detach().clone() for name, p in tensors.items()}
            for p in tensors.values():
                if p.dtype == torch.bfloat16:
                    p.data.zero_()  # comes back from the masters of all ranks
            optimizer = build()
            take_over(optimizer, state)
            restored = all(torch.equal(p, weights[name]) for name, p in tensors.items())
        model.zero_grad()
        for name, gradient in drawn(100 + step).items():
            tensors[name].main_grad.copy_(_contribution(name, gradient, world))
        if step == BAD and world.rank == world.size - 1:
            tensors["g.weight"].main_grad[0, 0] = torch.nan
        model.ddps[0].start_grad_sync()  # no backward pass tells megatron-core that gradients are there
        model.finish()
        seen = logits_of(step).chunk(groups.tp.size())[groups.tp.rank()]
        elsewhere = step % groups.dp_cp.size() != groups.dp_cp.rank()  # the largest logits are among another rank's tokens
        target.max_logits.copy_(seen - 60 if elsewhere else seen)
        reports.append(optimizer.step(finite=not (step == REFUSED and world.rank == 0)))
    return _facts(optimizer, model.shards, reports, world) | {"restored": restored}


def overlap(layout: ParallelConfig) -> list[tuple[str, int]]:
    """What one step of Muon starts and waits for, and when it computes: (what, number of the route; -1 for computing)."""
    world = parallel.start(layout)
    tensors = {n: nn.Parameter(_local(n, value, world)) for n, value in drawn(0).items()}
    cards = cards_of(tensors)
    mark(cards, world)
    model = parallel.wrap(_Toy(megatron_config(k3.preset("tiny"), world, torch.float64), tensors), cards, world)
    muon = optim.build(Case().config(), cards, steps=1, shards=model.shards).muon
    number = {id(route): i for i, route in enumerate(muon.plan.routes.values())}
    log: list[tuple[str, int]] = []

    class Waited:
        def __init__(self, what: str, route: Exchange, handle: Any):
            self.entry, self.handle = (f"{what} arrived", number[id(route)]), handle

        def wait(self) -> None:
            log.append(self.entry)
            self.handle.wait()

    ways = ("to_owners", "fetch", Exchange.to_owners), ("to_holders", "return", Exchange.to_holders)
    for name, what, way in ways:

        def logged(route: Exchange, given: Any, what: str = what, real: Any = way) -> Pending:
            log.append((what, number[id(route)]))
            pending: Pending = real(route, given)
            assert pending._handle is not None  # asynchronous
            pending._handle = Waited(what, route, pending._handle)
            return pending

        setattr(Exchange, name, logged)
    real = Muon._update

    def update(self: Muon, batch: Any, *rest: Any) -> Any:
        log.append(("compute", -1))
        return real(self, batch, *rest)

    Muon._update = update  # type: ignore[method-assign, assignment]
    parts = {n: s for n, s in model.shards.items() if s.start < s.stop}
    weights = {n: s.weight for n, s in parts.items()}
    gradients = {n: torch.randn_like(w) for n, w in weights.items()}
    muon.step(weights, gradients, lr=0.01, decay=0.0, scale=1.0)
    return log


def _facts(optimizer: Optimizer, shards: Shards, reports: list[StepReport], world: World) -> dict[str, Any]:
    state = optimizer.state_dict()
    owned = [m for route in optimizer.muon.plan.routes.values() for m in route.owned]
    return {
        "tensor": world.groups.tp.rank(),
        "expert": world.groups.ep.rank(),
        "weights": {n: p.detach().clone() for n, p in optimizer.parameters.items()},
        "masters": {n: t.clone() for n, t in optimizer.masters.items()},
        "parts": {n: (s.start, s.stop) for n, s in shards.items()},
        "state": {n: tuple(t.shape) for n, t in state.items()},
        "reports": reports,
        "blocks": optimizer.muon.blocks,
        "owned": [(m.name, m.place) for m in owned],
        "pieces": [len(m.pieces) for m in owned],
    }


def _local(name: str, value: Tensor, world: World) -> Tensor:
    if KINDS[name][1].per_expert:
        return value.chunk(world.groups.ep.size())[world.groups.ep.rank()].clone()
    return shard(value, card(name), world).clone()


def _contribution(name: str, gradient: Tensor, world: World) -> Tensor:
    """Unequal shares of the gradient, so that only their sum over the right ranks is right."""
    placement = KINDS[name][2]
    data = world.groups.expt_dp if placement.group is Group.EXPERT else world.groups.dp_cp
    share = _share(data.rank(), data.size())
    partial = TensorAxis.REPLICATE_SUM, *([TensorAxis.REPLICATE_SEQUENCE] if world.sequence_parallel else [])
    if placement.tensor in partial:
        share *= _share(world.groups.tp.rank(), world.groups.tp.size())
    return _local(name, gradient, world) * share


def _share(rank: int, size: int) -> float:
    return 2 * (rank + 1) / (size * (size + 1))


def _drop_returned_pieces() -> None:
    real = Exchange.to_holders

    def to_holders(self: Exchange, wholes: Sequence[Tensor]) -> Pending:
        pieces = real(self, wholes).wait()
        return Pending(None, lambda: [p if m.owner == self.rank else torch.zeros_like(p) for m, p in zip(self.held, pieces)])

    Exchange.to_holders = to_holders  # type: ignore[method-assign]


def _skip_the_tensor_gather() -> None:
    def over_tensor_ranks(self: Shards, values: Tensor) -> Tensor:
        return values.expand(self.tensor_size, *values.shape)

    Shards.over_tensor_ranks = over_tensor_ranks  # type: ignore[method-assign]


def _count_everything() -> None:
    real = Shards.of

    def of(buffers: Any, cards: CardTable, world: World) -> Shards:
        shards: dict[str, Shard] = {n: replace(s, counted=True) for n, s in real(buffers, cards, world).items()}
        return Shards(shards, world, buffers)

    Shards.of = of  # type: ignore[method-assign, assignment]


BREAK: dict[str, Callable[[], None]] = {
    "returned pieces dropped": _drop_returned_pieces,
    "tensor gather skipped": _skip_the_tensor_gather,
    "copies counted": _count_everything,
}
