"""What `k3 bench pipeline` runs on its ranks: one step, every payload on the wire attributed to its hop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import k3
import parallel
from k3.config import K3Config
from k3.stage import Stage
from parallel.config import ParallelConfig
from parallel.rows import RowBank
from parallel.traffic import Traffic, size_of

Sizes = dict[int, list[int]]  # by stage, one a micro-batch


@dataclass
class Hops:
    """Bytes that left this rank: `forward[g]` from stage g to g + 1, `backward[g]` from stage g to g - 1, headers included."""

    forward: Sizes = field(default_factory=dict)
    backward: Sizes = field(default_factory=dict)
    kept: int = 0  # most micro-batches that rows were kept for at a time


def on_rank(model: K3Config, layout: ParallelConfig, micro_batches: int, rows: int, length: int) -> Hops:
    world = parallel.start(layout, "cpu")
    built = k3.build(model, world)
    wrapped = parallel.wrap(built, k3.cards(built), world)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(model.vocab_size, (rows, length + 1), generator=generator) for _ in range(micro_batches)]
    passes = _Passes(built.rows)
    with _Sends(world) as traffic:
        parallel.run_step(wrapped, batches, passes.forward, lambda _, losses: (losses.sum(), None))
    following, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    return Hops(_by_stage(passes.forwards, traffic.to(following)), _by_stage(passes.backwards, traffic.to(before)), passes.kept)


class _Sends(Traffic):
    """Every single message, too: (rank it goes to, bytes)."""

    def __init__(self, world: parallel.World):
        super().__init__(world)
        self.messages: list[tuple[int, int]] = []

    def _count(self, func: Any, args: Sequence[Any]) -> None:
        super()._count(func, args)
        if func._schema.name == "c10d::send":
            self.messages.append((args[2], size_of(args[0])))

    def to(self, rank: int) -> list[int]:
        """Bytes of each header and the payload behind it, in the order of sending."""
        sizes = [size for peer, size in self.messages if peer == rank]
        return [header + payload for header, payload in zip(sizes[::2], sizes[1::2], strict=True)]


class _Passes:
    """The stages whose passes send something, in the order of their passes."""

    def __init__(self, bank: RowBank) -> None:
        self.bank, self.kept = bank, 0
        self.forwards: list[int] = []
        self.backwards: list[int] = []

    def forward(self, chunk: nn.Module, batch: Tensor) -> Tensor:
        stage = chunk.module
        assert isinstance(stage, Stage)
        if stage.payload is not None:
            stage.payload.register_hook(lambda _: self.backwards.append(stage.number))
        if not stage.is_last:
            self.forwards.append(stage.number)
        output = chunk(batch[:, :-1].contiguous(), labels=batch[:, 1:].contiguous())
        self.kept = max(self.kept, len(self.bank))
        return output


def _by_stage(stages: list[int], sizes: list[int]) -> Sizes:
    out: Sizes = {}
    for stage, size in zip(stages, sizes, strict=True):
        out.setdefault(stage, []).append(size)
    return out
