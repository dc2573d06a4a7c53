"""The AdamW update itself, by torch or by a fused kernel of DeepSpeed, Transformer Engine or apex, where they are installed.

All do the same arithmetic on the same tensors and differ in rounding alone, so a run may change from one to another. Within a
run all ranks take the same one: copies of a parameter must stay equal bit for bit.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.dispatch import Backend, choose
from optim.config import AdamWConfig, AdamWKernel, Offload, OptimConfig
from parallel.shards import Shards

log = logging.getLogger("k3.optim")


@dataclass(frozen=True)
class Update:
    """Of tensors that have had equally many updates. `scale` multiplies every gradient (clipping)."""

    cfg: AdamWConfig
    count: int  # of updates, with this one
    lr: float
    decay: float
    scale: float


type Kernel = Callable[[Update, list[Tensor], list[Tensor], list[Tensor], list[Tensor]], None]
"""(update, weights, gradients, first moments, second moments): changes all but the gradients in place."""


def by_torch(u: Update, weights: list[Tensor], gradients: list[Tensor], first: list[Tensor], second: list[Tensor]) -> None:
    """Any device and dtype; one temporary as large as the weights."""
    torch._foreach_mul_(first, u.cfg.beta1)
    torch._foreach_add_(first, gradients, alpha=(1 - u.cfg.beta1) * u.scale)
    torch._foreach_mul_(second, u.cfg.beta2)
    torch._foreach_addcmul_(second, gradients, gradients, value=(1 - u.cfg.beta2) * u.scale * u.scale)
    denominator = torch._foreach_sqrt(second)
    torch._foreach_div_(denominator, (1 - u.cfg.beta2**u.count) ** 0.5)
    torch._foreach_add_(denominator, u.cfg.eps)
    if u.decay:
        torch._foreach_mul_(weights, 1 - u.lr * u.decay)
    torch._foreach_addcdiv_(weights, first, denominator, value=-u.lr / (1 - u.cfg.beta1**u.count))


def deepspeed(u: Update, weights: list[Tensor], gradients: list[Tensor], first: list[Tensor], second: list[Tensor]) -> None:
    """DeepSpeedCPUAdam's loop over vector registers: contiguous float32 tensors in CPU memory."""
    adam = _deepspeed_adam()
    for weight, gradient, m, v in zip(weights, _scaled(gradients, u.scale), first, second):
        adam.ds_opt_adam.adam_update(
            adam.opt_id, u.count, u.lr, u.cfg.beta1, u.cfg.beta2, u.cfg.eps, u.decay, True, weight, gradient.contiguous(), m, v
        )


def multi_tensor(find: Callable[[], tuple[Any, Any]]) -> Kernel:
    """The kernel behind the FusedAdam of Transformer Engine and of apex, which share its contract; float32 on CUDA.

    find: imports (the function that cuts tensors into chunks, the kernel).
    """

    def run(u: Update, weights: list[Tensor], gradients: list[Tensor], first: list[Tensor], second: list[Tensor]) -> None:
        apply, kernel = find()
        unused = torch.zeros(1, dtype=torch.int32, device=weights[0].device)  # set by kernels that look for overflow
        lists = [_scaled(gradients, u.scale), weights, first, second]
        decoupled = bias_correction = 1
        apply(
            kernel, unused, lists, u.lr, u.cfg.beta1, u.cfg.beta2, u.cfg.eps, u.count, decoupled, bias_correction, u.decay
        )  # fmt: skip

    return run


def _scaled(gradients: list[Tensor], scale: float) -> list[Tensor]:
    return gradients if scale == 1 else list(torch._foreach_mul(gradients, scale))


@cache
def _transformer_engine() -> tuple[Any, Any]:
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.optimizers import multi_tensor_applier

    return multi_tensor_applier, tex.multi_tensor_adam


@cache
def _apex() -> tuple[Any, Any]:
    import amp_C  # also says that this is NVIDIA's apex: the package index has another of that name
    from apex.multi_tensor_apply import multi_tensor_applier

    return multi_tensor_applier, amp_C.multi_tensor_adam


@cache
def _deepspeed_adam() -> Any:
    """One for the process: it holds no state of the tensors. Its C++ part is compiled when a machine first asks for it."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it warns that it found none
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "No CUDA runtime is found"
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from torch.utils.cpp_extension import _get_build_directory

    folder = Path(_get_build_directory("cpu_adam", verbose=False))
    with (folder / "k3.lock").open("w") as ours:
        fcntl.flock(ours, fcntl.LOCK_EX)  # goes with its process, unlike torch's
        clear_stale_lock(folder)
        if not (folder / "cpu_adam.so").exists():
            log.info(f"DeepSpeedCPUAdam is compiled, once for this machine and environment: some minutes (in {folder})")
        return DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(1))], adamw_mode=True)


def clear_stale_lock(folder: Path) -> None:
    """Removes the lock of a build that was killed: torch would wait for it for ever. The caller has kept out other ranks."""
    lock = folder / "lock"
    if lock.exists() and not any(_works_in(process, folder) for process in Path("/proc").glob("[0-9]*")):
        log.warning(f"{lock} was left over from a build that was killed: removed")
        lock.unlink(missing_ok=True)


def _works_in(process: Path, folder: Path) -> bool:
    try:
        return (process / "cwd").resolve() == folder.resolve()  # ninja runs there
    except OSError:  # it has ended, or is someone else's
        return False


def _refuses_deepspeed(where: Offload, kinds: Sequence[tuple[torch.device, torch.dtype]], asked: bool) -> str | None:
    if where is not Offload.cpu and not asked:
        return "optim.offload=none"
    if any(device.type != "cpu" for device, _ in kinds):
        return "masters are not in CPU memory; give optim.offload=cpu"
    if (reason := _not_float32(kinds)) or (reason := _absent("deepspeed", "the extra `deepspeed`")):
        return reason
    try:
        _deepspeed_adam()
    except Exception as error:  # no compiler, a build that fails, a library that does not load
        cause = error.__cause__ or error
        return f"it could not be built ({type(cause).__name__}: {str(cause).strip().splitlines()[0]})"
    return None


def _refuses_cuda(name: str, package: str, find: Callable[[], Any]) -> Callable[..., str | None]:
    def refuses(where: Offload, kinds: Sequence[tuple[torch.device, torch.dtype]], asked: bool) -> str | None:
        if any(device.type != "cuda" for device, _ in kinds):
            return "masters are not on a CUDA device"
        if (reason := _not_float32(kinds)) or (reason := _absent(package, name)):
            return reason
        try:
            find()
        except Exception as error:  # a package of that name without its CUDA part
            return f"it cannot be imported ({type(error).__name__}: {str(error).strip().splitlines()[0]})"
        return None

    return refuses


def _not_float32(kinds: Sequence[tuple[torch.device, torch.dtype]]) -> str | None:
    other = {str(dtype).removeprefix("torch.") for _, dtype in kinds} - {"float32"}
    return f"it takes float32, and there are masters of {', '.join(sorted(other))}" if other else None


def _absent(package: str, name: str) -> str | None:
    return None if importlib.util.find_spec(package) else f"{name} is not installed"


BACKENDS: tuple[Backend, ...] = (
    Backend(
        AdamWKernel.transformer_engine.value,
        multi_tensor(_transformer_engine),
        _refuses_cuda("Transformer Engine (the extra `gpu`)", "transformer_engine", _transformer_engine),
    ),
    Backend(AdamWKernel.apex.value, multi_tensor(_apex), _refuses_cuda("NVIDIA apex", "amp_C", _apex)),
    Backend(AdamWKernel.deepspeed.value, deepspeed, _refuses_deepspeed),
    Backend(AdamWKernel.torch.value, by_torch),
)


def kernel(cfg: OptimConfig, masters: Mapping[str, Tensor], shards: Shards) -> Backend:
    """The kernel for these masters: `optim.adamw.kernel`, or with `auto` the first of BACKENDS, if all ranks come to the same.

    Every rank must call it. Raises ValueError, on all of them, where the kernel that was asked for cannot run on one.
    """
    only = None if cfg.adamw.kernel is AdamWKernel.auto else cfg.adamw.kernel.value
    kinds = sorted({(t.device, t.dtype) for t in masters.values()}, key=str)
    number, failure = None, f"another rank cannot run it; give optim.adamw.kernel={AdamWKernel.torch.value}"
    if kinds:  # a rank without anything for AdamW has no say
        try:
            number = BACKENDS.index(choose("AdamW", BACKENDS, cfg.offload, kinds, only is not None, only=only))
        except ValueError as error:
            number, failure = len(BACKENDS), str(error)
    lowest, highest = shards.range(number)
    if highest == len(BACKENDS):
        raise ValueError(f"optim.adamw.kernel={only}: {failure}")
    if lowest != highest:
        log.info("AdamW: ranks found different kernels, and copies must stay equal bit for bit: all take torch's")
        return BACKENDS[-1]
    return BACKENDS[highest]


def describe(backend: Backend) -> str:
    """`DeepSpeedCPUAdam (deepspeed 0.19.8)`."""
    names = {"transformer_engine": "Transformer Engine", "apex": "apex", "deepspeed": "DeepSpeedCPUAdam", "torch": "torch"}
    packages = {"transformer_engine": "transformer-engine", "deepspeed": "deepspeed", "torch": "torch"}
    if (package := packages.get(backend.name)) is None:
        return names[backend.name]
    return f"{names[backend.name]} ({package} {importlib.metadata.version(package)})"
