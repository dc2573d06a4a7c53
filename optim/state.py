"""The optimizer's state as flat named tensors, and as boxes of whole ones for checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel.boxes import Box
from parallel.shards import Shard

if TYPE_CHECKING:
    from optim.optimizer import Optimizer


def is_rounded(shard: Shard) -> bool:
    """Whether a master holds more than the weight does."""
    return shard.parameter.dtype == torch.bfloat16


def collect(optimizer: Optimizer) -> dict[str, Tensor]:
    """`step`, `skipped`, `guard.*`, per parameter `.momentum` | `.exp_avg`, `.exp_avg_sq`, `.updates`, and `.master` for bf16.

    Of this rank's part alone: shaped like the parameter where that is the whole, flat where it is cut, absent where it is empty.
    The same with and without `optim.offload`: a master of a wider weight would only repeat the model.
    """
    return _replicated(optimizer) | {f"{name}.{kind}": tensor for name, kind, tensor in _saved(optimizer)}


def boxes(optimizer: Optimizer) -> Iterator[Box]:
    """The same, of this rank's part, in the coordinates of the whole state, which is the same under every layout."""
    rank = 0 if optimizer.shards.world is None else optimizer.shards.world.rank
    for name, tensor in _replicated(optimizer).items():
        yield Box.whole(name, tensor, rank)
    for name, kind, tensor in _saved(optimizer):
        shard = optimizer.shards[name]
        if kind == "updates":  # one number of the whole parameter, which all its parts count alike
            yield Box.whole(f"{name}.{kind}", tensor, 0 if shard.leads else 1)
        else:
            yield from shard.boxes(f"{name}.{kind}", tensor)


def offloaded_bytes(optimizer: Optimizer) -> tuple[int, int]:
    """(bytes of this rank's masters and moments, how many of them its weights' device is spared), with `optim.offload=cpu`.

    Nothing is spared where the device is the CPU itself; nor are masters that only offloading takes.
    """
    state = [t for _, kind, t in _of_parameters(optimizer) if kind != "updates"]
    held = sum(t.nbytes for t in state if t.device == optimizer.home.device)
    extra = sum(t.nbytes for n, t in optimizer.masters.items() if not is_rounded(optimizer.shards[n]))
    return held, 0 if optimizer.shards.device == optimizer.home.device else held - extra


def _replicated(optimizer: Optimizer) -> dict[str, Tensor]:
    """What all ranks have alike."""
    return optimizer.counters() | optimizer.guard.tensors()


def _saved(optimizer: Optimizer) -> Iterator[tuple[str, str, Tensor]]:
    for name, kind, tensor in _of_parameters(optimizer):
        if kind != "master" or is_rounded(optimizer.shards[name]):
            yield name, kind, tensor


def _of_parameters(optimizer: Optimizer) -> Iterator[tuple[str, str, Tensor]]:
    """(parameter, kind, tensor), in the model's order."""
    kinds = {
        "master": optimizer.masters,
        "momentum": optimizer.muon.momentum,
        "exp_avg": optimizer.adamw.exp_avg,
        "exp_avg_sq": optimizer.adamw.exp_avg_sq,
        "updates": optimizer.adamw.updates,
    }
    for name in optimizer.parameters:
        yield from ((name, kind, tensors[name]) for kind, tensors in kinds.items() if name in tensors)
