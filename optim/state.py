"""The optimizer's state as flat named tensors, and as boxes of the whole parameters' state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from parallel.boxes import Box

if TYPE_CHECKING:
    from optim.optimizer import Optimizer


def collect(optimizer: Optimizer) -> dict[str, Tensor]:
    """`step`, `skipped`, `guard.*`, per parameter `.momentum` | `.exp_avg`, `.exp_avg_sq`, `.updates`, and `.master` for bf16.

    Of this rank's part alone: shaped like the parameter where that is the whole, flat where it is cut, absent where it is empty.
    """
    return _replicated(optimizer) | {f"{name}.{kind}": tensor for name, kind, tensor in _of_parameters(optimizer)}


def boxes(optimizer: Optimizer) -> Iterator[Box]:
    """The same, of this rank's part, in the coordinates of the whole state, which is the same under every layout."""
    rank = 0 if optimizer.shards.world is None else optimizer.shards.world.rank
    for name, tensor in _replicated(optimizer).items():
        yield Box.whole(name, tensor, rank)
    for name, kind, tensor in _of_parameters(optimizer):
        shard = optimizer.shards[name]
        if kind == "updates":  # one number of the whole parameter, which all its parts count alike
            yield Box.whole(f"{name}.{kind}", tensor, 0 if shard.leads else 1)
        else:
            yield from shard.boxes(f"{name}.{kind}", tensor)


def _replicated(optimizer: Optimizer) -> dict[str, Tensor]:
    """What all ranks have alike."""
    return optimizer.counters() | optimizer.guard.tensors()


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
