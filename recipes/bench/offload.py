"""`k3 bench offload`: AdamW's kernels on an offloaded optimizer, the weights they make, and where masters and moments lie."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

import k3
import parallel
from optim.config import AdamWConfig, AdamWKernel, Offload, OptimConfig, OptimizerName
from optim.state import offloaded_bytes
from parallel.world import World
from recipes.assemble import assemble
from recipes.console import say
from recipes.summary import versions

STEPS = 10
SIDES = (
    (Offload.none, AdamWKernel.torch),
    (Offload.cpu, AdamWKernel.torch),
    (Offload.cpu, AdamWKernel.deepspeed),
)


@dataclass
class Run:
    """STEPS steps of model=nano in bf16 with AdamW for everything, from gradients that are the same on all sides."""

    offload: Offload
    kernel: AdamWKernel
    elements: int
    held: int  # bytes of masters and moments
    device: int | None  # bytes in use on the device after the steps; None where it is the CPU
    seconds: list[float] = field(default_factory=list)
    masters: dict[str, Tensor] = field(default_factory=dict)


def run() -> None:
    """Prints a line a side: median time of a step, how far its weights are from torch's, and bytes. A kernel that is not there is
    left out, with the reason.
    """
    facts = {**versions(), "threads": torch.get_num_threads()}
    say("versions: " + ", ".join(f"{name} {value}" for name, value in facts.items()))
    world = parallel.start()
    try:
        runs: list[Run] = []
        for offload, kernel in SIDES:
            try:
                runs.append(steps_of(offload, kernel, world))
            except ValueError as error:
                say(f"  left out: {error}")
        first = runs[0]
        say(f"model=nano, bf16, optim=adamw: {first.elements / 1e6:.3g} million parameters, {STEPS} steps, on {world.device}")
        for r in runs:
            keys = f"optim.offload={r.offload.value} optim.adamw.kernel={r.kernel.value}"
            place = "in CPU memory" if r.offload is Offload.cpu else "beside the weights"
            device = "" if r.device is None else f", {r.device / 1e6:,.1f} MB in use on the device"
            say(
                f"  {keys:<46} {1e3 * statistics.median(r.seconds):7.1f} ms a step   weights differ by {apart(r, first):.1e}   "
                f"{r.held / 1e6:,.1f} MB of masters and moments {place}{device}"
            )
        if world.device.type == "cpu":
            say("  here both places are the same memory; a GPU is spared what lies in the CPU's")
    finally:
        parallel.stop()


def steps_of(offload: Offload, kernel: AdamWKernel, world: World) -> Run:
    """Raises ValueError, naming the reason, where the kernel cannot run."""
    cfg = OptimConfig(name=OptimizerName.adamw, lr=1e-3, offload=offload, adamw=AdamWConfig(kernel=kernel))
    parts = assemble(k3.preset("nano"), cfg, world, dtype=torch.bfloat16, seed=0, steps=STEPS)
    optimizer = parts.optimizer
    generator = torch.Generator().manual_seed(0)
    seconds = []
    for _ in range(STEPS):
        for shard in optimizer.shards.values():
            assert shard.gradient is not None
            shard.gradient.copy_(torch.randn(shard.gradient.shape, generator=generator))
        _wait(world)
        began = time.perf_counter()
        optimizer.step()
        _wait(world)
        seconds.append(time.perf_counter() - began)
    held, _ = offloaded_bytes(optimizer)
    masters = {n: t.cpu().clone() for n, t in optimizer.masters.items()}
    elements = sum(p.numel() for p in optimizer.parameters.values())
    device = torch.cuda.memory_allocated() if world.device.type == "cuda" else None
    return Run(offload, kernel, elements, held, device, seconds, masters)


def apart(one: Run, other: Run) -> float:
    """The largest norm-relative difference of a parameter's masters."""
    common = one.masters.keys() & other.masters.keys()
    return max(float((one.masters[n] - other.masters[n]).norm() / other.masters[n].norm().clamp(min=1e-30)) for n in common)


def _wait(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize()
