"""The two gradient buffers of a rank's model chunks, and the way from there into the persistent shards (report 5.2.2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class GradientCountError(RuntimeError):
    """The backward passes that ran are not those that were announced."""


@dataclass(frozen=True)
class Region:
    """One bucket of a chunk: where it lies in a slot, and this rank's part of its gradient, summed over the step so far."""

    first: int  # byte of the slot
    group: Any  # the ranks that replicate the bucket's parameters
    shard: Tensor  # [elements of the bucket / ranks]

    @property
    def stop(self) -> int:
        """The byte after the last."""
        return self.first + self.shard.nbytes * self.group.size()

    def whole(self, memory: Tensor) -> Tensor:
        """The bucket, flat: a view of the slot's memory."""
        return memory[self.first : self.stop].view(self.shard.dtype)

    def mine(self, memory: Tensor) -> Tensor:
        """This rank's part of `whole`."""
        return self.whole(memory).view(self.group.size(), -1)[self.group.rank()]


class Slot:
    """A buffer that any chunk's gradients fit in. Filled, reduced and added to shards, then free for another chunk.

    size: in bytes. Where shards lie on another device than the slot, parts go there through `landing`, memory of that other
    device with room for any chunk's parts.
    """

    def __init__(self, size: int, device: torch.device, landing: Tensor | None = None):
        self.memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self.landing = landing
        self._reducing: list[tuple[Any, Region]] = []
        self._landed: list[tuple[Tensor, Tensor]] = []  # (a part on its way, its shard)
        self._arrival: torch.cuda.Event | None = None

    def reduce(self, regions: Iterable[Region]) -> None:
        """Starts to sum the regions over the ranks that replicate them. Their shards have the sum after `free` and `settle`."""
        for region in regions:
            handle = None
            if region.group.size() > 1:
                # in place, as megatron-core does it: this rank's part of the buffer receives the sum
                part, whole = region.mine(self.memory), region.whole(self.memory)
                handle = dist.reduce_scatter_tensor(part, whole, group=region.group, async_op=True)
            self._reducing.append((handle, region))

    def free(self) -> None:
        """Waits for what is being reduced; the memory may be overwritten afterwards."""
        if not self._reducing:
            return
        self.settle()  # `landing` is about to be overwritten
        reducing, self._reducing = self._reducing, []
        used = 0
        for handle, region in reducing:
            if handle is not None:
                handle.wait()
            part = region.mine(self.memory)
            if self.landing is None:
                region.shard.add_(part)
                continue
            landed = self.landing[used : used + part.nbytes].view(part.dtype)
            landed.copy_(part, non_blocking=True)
            self._landed.append((landed, region.shard))
            used += part.nbytes
        if self._landed and self.memory.is_cuda:
            # the host goes on launching the next passes while the parts travel, and adds them when the slot is next in turn
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    def settle(self) -> None:
        """Adds what has landed to its shards."""
        if self._arrival is not None:
            self._arrival.synchronize()
        landed, self._landed, self._arrival = self._landed, [], None
        for part, shard in landed:
            shard.add_(part)


class Filling(Protocol):
    """What turns need to know of a chunk."""

    number: int
    regions: list[Region]

    def missing(self) -> str:
        """Which gradients of the chunk's turn have not come."""


class Turns:
    """Whose turn it is: the chunks fill the two slots alternately, one chunk at a time."""

    def __init__(self, chunks: Sequence[Sequence[Region]], device: torch.device, home: torch.device):
        """chunks: the regions of each; device: of the slots; home: of the shards."""
        size = max((region.stop for regions in chunks for region in regions), default=0)
        landed = max((sum(region.shard.nbytes for region in regions) for regions in chunks), default=0)

        def slot() -> Slot:
            if home == device:
                return Slot(size, device)
            return Slot(size, device, torch.empty(landed, dtype=torch.uint8, device=home, pin_memory=torch.cuda.is_available()))

        self.slots = slot(), slot()
        self._now = 0  # the slot that is filled, or was last
        self._filling: Filling | None = None  # the chunk that fills it

    def take(self, chunk: Filling) -> int:
        """The number of the slot that this chunk's gradients go to; in a new turn the other one, cleared.

        Raises GradientCountError where the turn of another chunk is not over.
        """
        if self._filling is chunk:
            return self._now
        if self._filling is not None:
            raise GradientCountError(
                f"chunk {chunk.number}: its backward pass began before the turn of another was over; the schedule and begin_step "
                f"must have the same group of micro-batches\n{self._filling.missing()}"
            )
        self._now = 1 - self._now
        slot = self.slots[self._now]
        slot.free()
        for region in chunk.regions:
            region.whole(slot.memory).zero_()
        self._filling = chunk
        return self._now

    def over(self, chunk: Filling) -> None:
        """The chunk whose turn it is has all gradients of its group."""
        self.slots[self._now].reduce(chunk.regions)
        self._filling = None

    def finish(self) -> None:
        """Waits until the shards have everything."""
        for slot in self.slots:
            slot.free()
        for slot in self.slots:
            slot.settle()


def group_sizes(micro_batches: int, group: int) -> list[int]:
    """How many micro-batches pass a chunk in a row, turn by turn: megatron-core's `get_schedule_table`."""
    return [min(group, micro_batches - first) for first in range(0, micro_batches, group)]
