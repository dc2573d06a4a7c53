"""Bytes that this rank hands to other ranks, by parallel axis and collective.

Sees torch.distributed's own operators, so collectives of megatron-core and of backward passes are counted like ours.

Convention, for a group of n ranks and b the bytes of one rank's tensor; what stays on the rank never counts:
    all-gather      b (n - 1)        its shard b, to every other rank
    reduce-scatter  b (n - 1)        its part of every other rank's result b
    all-reduce      2 b (n - 1) / n  a reduce-scatter and an all-gather of b / n each
    all-to-all      the slices meant for other ranks
    send            b
    broadcast, scatter               b for every other rank, by the root alone
    gather, reduce                   b, by every rank but the root
It is the least any algorithm sends in a balanced way, whatever the backend really does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.world import World

# fields of megatron-core's ProcessGroupCollection, by axis
AXES = {
    "tensor": ("tp",),
    "context": ("cp",),
    "data": ("dp", "dp_cp"),
    "expert": ("ep", "tp_ep"),
    "expert-data": ("expt_dp",),
    "pipeline": ("pp", "embd"),
    "all": ("tp_dp_cp",),  # every rank that holds other tokens: expert loads
}


class Traffic(TorchDispatchMode):
    """`with Traffic(world) as traffic: ...`, then `traffic.bytes[axis][collective]`; nothing is listed that sent nothing."""

    def __init__(self, world: World):
        super().__init__()
        self.bytes: dict[str, dict[str, int]] = {}
        self._counting = True
        self._axes = {}
        for axis, fields in AXES.items():
            for field in fields:
                group = getattr(world.groups, field, None)
                if isinstance(group, ProcessGroup):
                    self._axes[group.group_name] = axis

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Counts nothing inside: collectives that measure rather than train."""
        self._counting = False
        try:
            yield
        finally:
            self._counting = True

    def of_all_ranks(self) -> dict[str, dict[str, int]]:
        """`bytes`, summed over all ranks, each of which calls it after the `with`."""
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, self.bytes)
        total: dict[str, dict[str, int]] = {}
        for one in every:
            for axis, collectives in one.items():
                of_axis = total.setdefault(axis, {})
                for collective, sent in collectives.items():
                    of_axis[collective] = of_axis.get(collective, 0) + sent
        return total

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if self._counting and func.namespace == "c10d":
            self._count(func, args)
        return func(*args, **(kwargs or {}))

    def _count(self, func: Any, args: Sequence[Any]) -> None:
        name = func._schema.name.removeprefix("c10d::")
        if name in SILENT:
            return
        if name not in RULES:
            raise NotImplementedError(f"c10d::{name}: there is no rule that says what it sends")
        collective, rule = RULES[name]
        at = next(i for i, a in enumerate(func._schema.arguments) if a.name == "process_group")
        group = ProcessGroup.unbox(args[at])
        if sent := rule(args, group.size(), group.rank()):
            axis = self._axes.get(group.group_name, "all")
            if collective == "send" and axis == "all":
                axis = "pipeline"  # between two pipeline ranks megatron-core sends one way through the group of all ranks
            of_axis = self.bytes.setdefault(axis, {})
            of_axis[collective] = of_axis.get(collective, 0) + sent


def size_of(tensors: Any) -> int:
    """Bytes of a tensor, or of all of a list."""
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(size_of, tensors))


def _to_others(position: int) -> Callable[..., int]:
    """The argument at `position`, to every other rank."""
    return lambda args, n, rank: size_of(args[position]) * (n - 1)


def _all_reduce(args: Sequence[Any], n: int, rank: int) -> int:
    return 2 * size_of(args[0]) * (n - 1) // n


def _all_to_all(args: Sequence[Any], n: int, rank: int) -> int:
    tensor, splits = args[1], args[4]
    rows = len(tensor)
    own = splits[rank] if splits else rows // n
    return size_of(tensor) * (rows - own) // rows if rows else 0


def _all_to_all_of_lists(args: Sequence[Any], n: int, rank: int) -> int:
    return sum(size_of(tensor) for peer, tensor in enumerate(args[1]) if peer != rank)


def _from_root(position: int, root: int) -> Callable[..., int]:
    """What the root sends: the argument at `position` (all peers' tensors of a scatter, or one tensor) to every other rank."""

    def sent(args: Sequence[Any], n: int, rank: int) -> int:
        return size_of(args[position]) * (n - 1) if rank == args[root] else 0

    return sent


def _to_root(position: int, root: int) -> Callable[..., int]:
    return lambda args, n, rank: size_of(args[position]) if rank != args[root] else 0


# operator -> (collective, (arguments, ranks of the group, this rank in it) -> bytes)
RULES: dict[str, tuple[str, Callable[[Sequence[Any], int, int], int]]] = {
    "_allgather_base_": ("all-gather", _to_others(1)),
    "allgather_": ("all-gather", _to_others(1)),
    "allgather_coalesced_": ("all-gather", _to_others(1)),
    "allgather_into_tensor_coalesced_": ("all-gather", _to_others(1)),
    "_reduce_scatter_base_": ("reduce-scatter", _to_others(0)),
    "reduce_scatter_": ("reduce-scatter", _to_others(0)),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", _to_others(0)),
    "allreduce_": ("all-reduce", _all_reduce),
    "allreduce_coalesced_": ("all-reduce", _all_reduce),
    "alltoall_base_": ("all-to-all", _all_to_all),
    "alltoall_": ("all-to-all", _all_to_all_of_lists),
    "send": ("send", lambda args, n, rank: size_of(args[0])),
    "broadcast_": ("broadcast", _from_root(0, 2)),
    "scatter_": ("scatter", _from_root(0, 3)),
    "gather_": ("gather", _to_root(1, 3)),
    "reduce_": ("reduce", _to_root(0, 3)),
}
# receivers, and what carries no tensor
SILENT = {"recv_", "recv_any_source_", "barrier", "monitored_barrier_", "check_for_nan"}
