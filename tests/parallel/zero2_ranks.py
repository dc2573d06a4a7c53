"""What each rank of `test_zero2.py` does: toy chunks with parameters of awkward sizes, and the interleaved order of their passes.

megatron-core's own buffers, whole for the whole step, are the oracle; both get the same weights and data.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import k3
import optim
import parallel
from k3.backend import megatron_config
from optim.config import OptimConfig
from parallel.attributes import mark
from parallel.cards import Card, CardTable, Group, Optimizer, Placement, Published, TensorAxis, not_a_matrix, whole
from parallel.config import ParallelConfig
from parallel.shards import Shards
from parallel.world import World
from parallel.zero2 import GradientCountError, Zero2

WIDTH = 11
SAME, EXPERT = Placement(TensorAxis.REPLICATE_SAME), Placement(TensorAxis.REPLICATE_SAME, Group.EXPERT)


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype = torch.float64
    chunks: int = 3
    micro_batches: int = 4
    group: int = 2
    offload: bool = False
    landing: bool = False  # shards count as being on another device than the slots


class Fails(torch.autograd.Function):
    """Nothing forward, an exception backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ArithmeticError("on purpose")


class Toy(nn.Module):
    """Chunk `number`. Every parameter gets one gradient in each backward pass."""

    def __init__(self, config: Any, number: int, dtype: torch.dtype, local_experts: int, first_expert: int):
        super().__init__()
        self.config = config
        generator = torch.Generator().manual_seed(number)
        hidden = 37 - number % 3

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64) / WIDTH

        self.table = nn.Parameter(drawn(53, WIDTH).to(dtype))
        self.table.shared_embedding = number == 0  # megatron-core gives it a bucket of its own
        self.up = nn.Parameter(drawn(hidden, WIDTH).to(dtype))
        self.scale = nn.Parameter(drawn(hidden).to(torch.promote_types(dtype, torch.float32)))  # float32 in a bf16 chunk
        self.down = nn.Parameter(drawn(WIDTH, hidden).to(dtype))
        experts = drawn(2, WIDTH, 5)[first_expert : first_expert + local_experts]
        self.experts = nn.Parameter(experts.clone().to(dtype))
        self.one = nn.Parameter(drawn(1).to(dtype))

    def forward(self, x: Tensor, *, failing: bool = False) -> Tensor:
        x = x.to(self.up.dtype)
        wide = torch.tanh(x @ self.up.T)
        if failing:
            wide = Fails.apply(wide)
        y = x + (wide * self.scale).to(x.dtype) @ self.down.T
        return (y @ self.table.T).sum() + torch.sin(torch.einsum("nw,ewv->", y, self.experts)) * self.one.sum()

    def cards(self) -> CardTable:
        cards = {}
        for name, p in self.named_parameters():
            placement = EXPERT if name == "experts" else SAME
            matrix = name in ("up", "down")
            blocks = whole(p.shape[0]) if matrix else not_a_matrix()
            kind = Optimizer.MUON if matrix else Optimizer.ADAMW
            cards[name] = Card(name, (Published(name),), tuple(p.shape), blocks, placement, kind, matrix)
        return CardTable(cards, dict(self.named_parameters()))


def started(layout: ParallelConfig, case: Case) -> World:
    world = parallel.start(layout)
    # the same device by another name
    device = torch.device("cpu", 0) if case.landing else world.device
    return replace(world, device=device, config=replace(layout, zero=2, offload_gradients=case.offload))


def toys(world: World, case: Case) -> list[Toy]:
    config = megatron_config(k3.preset("tiny"), world, case.dtype)
    local = 2 // world.groups.ep.size()
    made = [Toy(config, n, case.dtype, local, local * world.groups.ep.rank()) for n in range(case.chunks)]
    for toy in made:
        mark(toy.cards(), world)
    return made


def zero1(toy: Toy, world: World) -> Any:
    """megatron-core's own wrapper, under ZeRO-1."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    wide = toy.up.dtype == torch.float64
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=not wide, use_distributed_optimizer=True)
    return DistributedDataParallel(toy.config, config, toy, pg_collection=world.groups)


def order(case: Case) -> list[tuple[int, int]]:
    """(chunk, micro-batch) of the backward passes of a step: megatron-core's."""
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    return [(case.chunks - 1 - c, m) for m, c in get_schedule_table(case.micro_batches, case.chunks, case.group)]


def batch(world: World, micro_batch: int) -> Tensor:
    seed = 1000 * (world.rank + 1) + micro_batch
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def back(wrapped: Any, x: Tensor, **how: bool) -> None:
    with wrapped.no_sync():
        wrapped(x, **how).backward()


def parts(wrapped: Sequence[Any], world: World) -> dict[str, dict[str, Any]]:
    """By parameter, this rank's part and its gradient."""
    out = {}
    for number, chunk in enumerate(wrapped):
        for name, shard in Shards.of([chunk], chunk.module.cards(), world).items():
            gradient = shard.gradient
            assert gradient is not None
            out[f"{number}.{name}"] = {"parts": shard.parts, "gradient": gradient.clone(), "device": gradient.device.type}
    return out


def oracle(world: World, case: Case) -> tuple[dict[str, Any], dict[str, int]]:
    """ZeRO-1's parts and gradients, and the bytes of its buffers."""
    wrapped = [zero1(toy, world) for toy in toys(world, case)]
    for chunk, m in order(case):
        back(wrapped[chunk], batch(world, m))
    for ddp in wrapped:
        ddp.finish_grad_sync()
    buffers = [[*ddp.buffers, *ddp.expert_parallel_buffers] for ddp in wrapped]
    sizes = [sum(b.grad_data.nbytes for b in one) for one in buffers]
    shards = sum(b.grad_data.nbytes // b.data_parallel_group.size() for one in buffers for b in one)
    return parts(wrapped, world), {"all": sum(sizes), "largest": max(sizes), "shards": shards}


def step(zero2: Zero2, world: World, case: Case) -> None:
    zero2.zero()
    zero2.begin_step(case.micro_batches, case.group)
    for chunk, m in order(case):
        back(zero2.chunks[chunk], batch(world, m))
    zero2.finish()


def compare(layout: ParallelConfig, cases: list[Case]) -> list[dict[str, Any]]:
    return [_compare(layout, case) for case in cases]


def _compare(layout: ParallelConfig, case: Case) -> dict[str, Any]:
    """The second step shows that the first is forgotten; to the third, another is added."""
    world = started(layout, case)
    want, _ = oracle(world, case)
    zero2 = Zero2(toys(world, case), world)
    for _ in range(2):
        step(zero2, world, case)
    got = parts(zero2.chunks, world)
    step(zero2, world, case)
    zero2.begin_step(case.micro_batches, case.group)
    for chunk, m in order(case):
        back(zero2.chunks[chunk], batch(world, m))
    zero2.finish()
    moved = any(slot.landing is not None for slot in zero2.turns.slots)
    return {"want": want, "got": got, "twice": parts(zero2.chunks, world), "moved": moved}


def trained(layout: ParallelConfig, case: Case) -> dict[str, Any]:
    """The weights after an optimizer's step on either kind of gradients."""
    world = started(layout, case)
    plain = [zero1(toy, world) for toy in toys(world, case)]
    for chunk, m in order(case):
        back(plain[chunk], batch(world, m))
    for ddp in plain:
        ddp.finish_grad_sync()
    zero2 = Zero2(toys(world, case), world)
    step(zero2, world, case)
    out = {}
    for kind, wrapped in (("want", plain), ("got", zero2.chunks)):
        for chunk in wrapped:
            cards = chunk.module.cards()
            optim.build(OptimConfig(lr=0.01), cards, steps=3, shards=Shards.of([chunk], cards, world)).step()
        out[kind] = {f"{n}.{k}": p.detach().clone() for n, c in enumerate(wrapped) for k, p in c.module.named_parameters()}
    return out


def measure(layout: ParallelConfig, cases: list[Case]) -> list[dict[str, Any]]:
    return [_measure(layout, case) for case in cases]


def _measure(layout: ParallelConfig, case: Case) -> dict[str, Any]:
    """Bytes of all tensors that this process can reach, but for weights and what was there before, after every pass."""
    world = started(layout, case)
    _, bound = oracle(world, case)
    inputs = [batch(world, m) for m in range(case.micro_batches)]
    gc.collect()
    gc.freeze()  # what is there is not looked at again
    zero2 = Zero2(toys(world, case), world)
    weights = [b.param_data for c in zero2.chunks for b in (*c.buffers, *c.expert_parallel_buffers)]
    known = {t.untyped_storage().data_ptr() for t in (*inputs, *weights)}
    seen, left = [], []
    zero2.begin_step(case.micro_batches, case.group)
    for chunk, m in order(case):
        back(zero2.chunks[chunk], inputs[m])
        new = {s.data_ptr(): s.nbytes() for t in tensors() if (s := t.untyped_storage()).data_ptr() not in known}
        seen.append(sum(new.values()))
        left += [n for n, p in zero2.chunks[chunk].module.named_parameters() if p.grad is not None or hasattr(p, "main_grad")]
    zero2.finish()
    gc.unfreeze()
    slots = storage_bytes(slot.memory for slot in zero2.turns.slots)
    shards = storage_bytes(region.shard for chunk in zero2.chunks for region in chunk.regions)
    return {"seen": seen, "left": left, "bound": bound, "slots": slots, "shards": shards}


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """The memory that the tensors keep alive; what several of them share counts once."""
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


def tensors() -> list[Tensor]:
    return [o for o in gc.get_objects() if issubclass(type(o), Tensor) and o.device.type != "meta"]


@contextmanager
def logged(log: list[tuple[str, int]]) -> Iterator[None]:
    """Notes ("start", n) and ("wait", n) of the n-th reduce-scatter."""
    real = dist.reduce_scatter_tensor

    class Spy:
        def __init__(self, handle: Any, number: int):
            self.handle, self.number = handle, number

        def wait(self) -> None:
            log.append(("wait", self.number))
            self.handle.wait()

    def spied(*args: Any, **kwargs: Any) -> Spy:
        number = sum(what == "start" for what, _ in log)
        log.append(("start", number))
        return Spy(real(*args, **kwargs), number)

    dist.reduce_scatter_tensor = spied
    try:
        yield
    finally:
        dist.reduce_scatter_tensor = real


def overlap(layout: ParallelConfig, case: Case) -> list[tuple[str, int]]:
    """Starts of and waits for reductions among ("begin", n) and ("end", n) of the n-th backward pass."""
    world = started(layout, case)
    zero2 = Zero2(toys(world, case), world)
    log: list[tuple[str, int]] = []
    with logged(log):
        zero2.zero()
        zero2.begin_step(case.micro_batches, case.group)
        for number, (chunk, m) in enumerate(order(case)):
            log.append(("begin", number))
            back(zero2.chunks[chunk], batch(world, m))
            log.append(("end", number))
        zero2.finish()
    return log


def interrupted(layout: ParallelConfig, case: Case, after: list[int]) -> list[dict[str, Any]]:
    return [_interrupted(layout, case, passes) for passes in after]


def _interrupted(layout: ParallelConfig, case: Case, passes: int) -> dict[str, Any]:
    """What is said where a step fails in the middle of the backward pass after `passes`, and another is begun."""
    world = started(layout, case)
    zero2 = Zero2(toys(world, case), world)
    zero2.zero()
    zero2.begin_step(case.micro_batches, case.group)
    errors = []
    try:
        for number, (chunk, m) in enumerate(order(case)):
            back(zero2.chunks[chunk], 3 + batch(world, m), failing=number == passes)
    except ArithmeticError as error:
        errors.append(str(error))
    try:
        zero2.begin_step(case.micro_batches, case.group)
    except GradientCountError as error:
        errors.append(str(error))
    return {"errors": errors}


def miscounted(layout: ParallelConfig, case: Case) -> dict[str, Any]:
    """What is said about schedules that are not the announced one, and how many gradients stay on parameters."""
    world = started(layout, case)
    passes, left = order(case), list[int]()

    def said(announced: tuple[int, int] | None, passes: list[tuple[int, int]], *, without: bool = False) -> str:
        zero2 = Zero2(toys(world, case), world)
        if without:  # a parameter that gets no gradient any more
            zero2.chunks[0].module.one.requires_grad_(False)
        if announced is not None:
            zero2.begin_step(*announced)
        try:
            for chunk, m in passes:
                back(zero2.chunks[chunk], batch(world, m))
            zero2.finish()
        except GradientCountError as error:
            return str(error)
        finally:
            left.append(sum(p.grad is not None for chunk in zero2.chunks for p in chunk.params_with_grad))
        return "nothing"

    told = case.micro_batches, case.group
    out: dict[str, Any] = {
        "right": said(told, passes),
        "one short": said(told, passes[:-1]),
        "a group short": said(told, passes[: len(passes) // 2]),
        "one more": said(told, [*passes, passes[-1]]),
        "a larger group": said((case.micro_batches, case.micro_batches), passes),
        "not begun": said(None, passes),
    }
    out["a parameter without"] = said(told, passes, without=True)
    return out | {"left": left}
