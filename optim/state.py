"""The optimizer's state as flat named tensors, and back, all or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel.shards import Shard

if TYPE_CHECKING:
    from optim.optimizer import Optimizer


class StateError(ValueError):
    """A saved state that does not fit this optimizer; the message lists every name."""


def is_rounded(shard: Shard) -> bool:
    """Whether a master holds more than the weight does."""
    return shard.parameter.dtype == torch.bfloat16


def collect(optimizer: Optimizer) -> dict[str, Tensor]:
    """`step`, `skipped`, `guard.*`, per parameter `.momentum` | `.exp_avg`, `.exp_avg_sq`, `.updates`, and `.master` for bf16.

    Of this rank's part alone: shaped like the parameter where that is the whole, flat where it is cut, absent where it is empty.
    The same with and without `optim.offload`: a master of a wider weight would only repeat the model.
    """
    out = optimizer.counters() | optimizer.guard.tensors()
    for name in optimizer.parameters:
        for kind, tensors in _of_parameters(optimizer).items():
            if name in tensors and (kind != "master" or is_rounded(optimizer.shards[name])):
                out[f"{name}.{kind}"] = tensors[name]
    return out


def offloaded_bytes(optimizer: Optimizer) -> tuple[int, int]:
    """(bytes of this rank's masters and moments, how many of them its weights' device is spared), with `optim.offload=cpu`.

    Nothing is spared where the device is the CPU itself; nor are masters that only offloading takes.
    """
    state = [t for kind, tensors in _of_parameters(optimizer).items() if kind != "updates" for t in tensors.values()]
    held = sum(t.nbytes for t in state if t.device == optimizer.home.device)
    extra = sum(t.nbytes for n, t in optimizer.masters.items() if not is_rounded(optimizer.shards[n]))
    return held, 0 if optimizer.shards.device == optimizer.home.device else held - extra


def _of_parameters(optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    return {
        "master": optimizer.masters,
        "momentum": optimizer.muon.momentum,
        "exp_avg": optimizer.adamw.exp_avg,
        "exp_avg_sq": optimizer.adamw.exp_avg_sq,
        "updates": optimizer.adamw.updates,
    }


@torch.no_grad()
def restore(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Copies `tensors` into the optimizer's own; raises StateError before the first copy."""
    own = collect(optimizer)
    faults = [f"missing: {name}" for name in own if name not in tensors]
    faults += [f"unknown: {name}" for name in tensors if name not in own]
    for name in own.keys() & tensors.keys():
        have, want = tensors[name], own[name]
        if have.shape != want.shape or have.dtype != want.dtype:
            faults.append(f"{name} is {tuple(have.shape)} {have.dtype}, this run needs {tuple(want.shape)} {want.dtype}")
    if faults:
        more = f"\n  and {len(faults) - 20} more" if len(faults) > 20 else ""
        lines = "\n  ".join(sorted(faults)[:20])
        raise StateError(f"the saved optimizer state does not fit this model and optim config:\n  {lines}{more}")
    for name, tensor in own.items():
        tensor.copy_(tensors[name])
