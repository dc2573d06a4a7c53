"""Pipeline ZeRO-2: of reduced gradients a rank holds its own cut, and chunks take turns with two buffers (report 5.2.2).

The interleaved schedule runs backward passes of one model chunk (virtual stage) for a group of micro-batches, then of another.
So the gradients of one group of one chunk are accumulated in one of two slots, reduce-scattered while the next chunk fills the
other, and added to this rank's shard of the chunk, which alone lives from the start of a step to the optimizer. The cut is
ZeRO-1's: masters, moments and the gathering of weights do not notice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from parallel import cpu_backend
from parallel.buffer_layout import Item, items_of, rearranged
from parallel.cards import CardTable
from parallel.config import ParallelError
from parallel.shards import cut
from parallel.slots import GradientCountError, Region, Turns, group_sizes
from parallel.world import World

cpu_backend.install()

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402


class Zero2:
    """The gradients of all model chunks of this rank. A step is `zero`, `begin_step`, the schedule, `finish`.

    modules: in the order of their virtual stages, each with its `config` (a TransformerConfig). `chunks` are megatron-core's
    wrappers around them, for its schedule and for `Shards.of`; `Shard.gradient` is complete after `finish`. With `cards`
    the cut divides few matrices (`parallel/buffer_layout.py`), else parameters lie in megatron-core's order.

    Sums over replicas, never averages; accumulates in float32 for bf16 and float32 parameters, in float64 for float64 ones.
    With `parallel.offload_gradients` the shards lie in CPU memory. Raises ParallelError for gradient_accumulation_fusion.
    """

    def __init__(self, modules: Sequence[nn.Module], world: World, cards: CardTable | None = None):
        items = None if cards is None else items_of(cards, world.groups.tp.size())
        home = torch.device("cpu") if world.config.offload_gradients else world.device
        self.chunks = [Chunk(module, number, world, home, items) for number, module in enumerate(modules)]
        self.turns = Turns([chunk.regions for chunk in self.chunks], world.device, home)
        for chunk in self.chunks:
            chunk.connect(self.turns)

    def zero(self) -> None:
        """Forgets the gradients of earlier steps."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def begin_step(self, micro_batches: int, group: int) -> None:
        """Before the schedule: it will run the backward passes of `micro_batches`, `group` of them in each turn of a chunk.

        Raises GradientCountError where backward passes of the step before did not run: after an exception in the middle of a step
        the run is over.
        """
        self._check_complete()
        for chunk in self.chunks:
            chunk.expect(group_sizes(micro_batches, group))

    def finish(self) -> None:
        """After the schedule: waits until the shards are complete. Idempotent.

        Raises GradientCountError, naming chunk and parameter, where a gradient did not come.
        """
        self._check_complete()
        self.turns.finish()

    def _check_complete(self) -> None:
        for chunk in self.chunks:
            chunk.check_complete()


class Chunk(DistributedDataParallel):
    """megatron-core's wrapper of one chunk, without a gradient buffer of its own. Made by `Zero2`."""

    def __init__(
        self, module: nn.Module, number: int, world: World, home: torch.device, items: Mapping[nn.Parameter, Item] | None = None
    ):
        config: Any = module.config
        if config.gradient_accumulation_fusion:
            raise ParallelError(
                "parallel.zero=2: cannot fuse the accumulation of gradients; give gradient_accumulation_fusion=False"
            )
        # set before wrapping: read at construction, and otherwise gradients come out divided by the data-parallel size
        config.calculate_per_token_loss = True
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=not any(p.dtype == torch.float64 for p in module.parameters()),
            average_in_collective=False,
            use_distributed_optimizer=True,
            overlap_grad_reduce=False,
        )
        layout = DistributedOptimizer.compute_full_param_layout(
            [p for p in module.parameters() if p.requires_grad], None, world.groups.dp_cp.size(), ddp_config,
            expert_data_parallel_world_size=world.groups.expt_dp.size(),
        )  # fmt: skip
        if items is not None:
            layout = rearranged(layout, items)
        super().__init__(config, ddp_config, module, pg_collection=world.groups, full_param_layout=layout)
        self.number = number
        self.regions: list[Region] = []
        self.reduced: dict[nn.Parameter, Tensor] = {}  # this rank's part of each parameter's gradient, for `Shards.of`
        self._places: dict[nn.Parameter, tuple[Region, int, int]] = {}  # the parameter's elements [start, stop) of a region
        self._names = {p: name for name, p in module.named_parameters()}
        self._leave_buffers(home)
        self.expect([])

    def _leave_buffers(self, home: torch.device) -> None:
        """Lays the buckets out one behind another, and gives back the memory that megatron-core has reserved for them."""
        parts, first = cut(self), 0
        for buffer in (*self.buffers, *self.expert_parallel_buffers):
            # shapes are still read from it (`cut`); reading values is an error, and not a stale number
            buffer.grad_data = buffer.grad_data.to("meta")
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                size = bucket.grad_data.numel()
                bucket.grad_data = buffer.grad_data[bucket.offset : bucket.offset + size]
                pinned = home.type == "cpu" and torch.cuda.is_available()
                shard = torch.zeros(size // group.size(), dtype=buffer.grad_dtype, device=home, pin_memory=pinned)
                region = Region(first, group, shard)
                first = region.stop
                self.regions.append(region)
                for parameter, (start, stop) in bucket.param_to_index.items():
                    self._places[parameter] = region, start, stop
                    low, high = parts[parameter][group.rank()]
                    part = shard.new_empty(0) if low == high else shard[start + low - group.rank() * len(shard) :][: high - low]
                    self.reduced[parameter] = part.view(parameter.shape) if len(part) == parameter.numel() else part
        for parameter in self.params_with_grad:
            del parameter.main_grad

    def connect(self, turns: Turns) -> None:
        self._turns = turns
        self._views = [
            {p: region.whole(slot.memory)[a:b].view(p.shape) for p, (region, a, b) in self._places.items()}
            for slot in turns.slots
        ]

    def expect(self, groups: Sequence[int]) -> None:
        """The backward passes to come: so many in each of the chunk's turns."""
        self._groups = list(groups)
        self._next_group()

    def _next_group(self) -> None:
        passes = self._groups.pop(0) if self._groups else 0
        self._left = dict.fromkeys(self.params_with_grad, passes)
        self._gradients_left = passes * len(self._left)

    def check_complete(self) -> None:
        """Raises GradientCountError where backward passes, or single gradients of them, did not come."""
        if self._gradients_left:
            raise GradientCountError(self.missing())

    def missing(self) -> str:
        """Which gradients of the announced ones have not come."""
        parameter = max(self._left, key=lambda p: self._left[p])
        return (
            f"chunk {self.number}: {self._gradients_left} gradients of a group of micro-batches did not come, among them "
            f"{self._left[parameter]} of {self._names[parameter]}, and {len(self._groups)} more groups; every trained "
            "parameter must get one gradient in each backward pass"
        )

    def _make_backward_post_hook(self, param: nn.Parameter) -> Callable[..., None]:
        """What megatron-core calls after each gradient of the parameter."""

        def hook(*unused: Any) -> None:
            self._accumulate(param)

        return hook

    @torch.no_grad()
    def _accumulate(self, parameter: nn.Parameter) -> None:
        if self._left[parameter] == 0:
            raise GradientCountError(
                f"chunk {self.number}: {self._names[parameter]} has got more gradients than there are micro-batches in its "
                "group; every trained parameter must get one in each backward pass, after begin_step"
            )
        slot = self._turns.take(self)
        if parameter.grad is not None:
            self._views[slot][parameter].add_(parameter.grad)
            parameter.grad = None
        self._left[parameter] -= 1
        self._gradients_left -= 1
        if self._gradients_left == 0:
            self._turns.over(self)
            self._next_group()

    def zero_grad_buffer(self) -> None:
        """Forgets the chunk's gradients of earlier steps."""
        for region in self.regions:
            region.shard.zero_()

    def start_grad_sync(self, *unused: Any) -> None:
        """Nothing: a reduction starts when the gradients of a group are complete."""

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Completes the chunk's gradients; see `Zero2.finish`."""
        self.check_complete()
        self._turns.finish()
