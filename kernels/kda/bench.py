"""Times the chunked form against fla-core's naive ones, forward and backward, interleaved in one process.

    python -m kernels.kda.bench

Run it under the launcher's allocator setting (glibc's page faults otherwise dominate all sides); the setting is printed.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.kda import chunked
from kernels.kda.gate import log_decay
from kernels.kda.reference import unit

ALLOCATOR = ("MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_", "LD_PRELOAD")


def inputs(batch: int, length: int, heads: int, key: int, value: int, seed: int = 0) -> list[Tensor]:
    """q, k, v, z, beta_logit, A_log, dt_bias with gradients on, about as at initialisation."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(batch, length, heads, d) for d in (key, key, value, key)] + [(batch, length, heads)]
    tensors = [torch.randn(s, generator=draw) for s in shapes]
    tensors += [torch.zeros(heads), torch.randn(heads, key, generator=draw) - 3.0]
    return [t.requires_grad_() for t in tensors]


def naive(function: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """A naive operator of fla-core, which takes normalised q and k, log-decays and betas, as one on our raw inputs."""

    def run(q: Tensor, k: Tensor, v: Tensor, z: Tensor, beta_logit: Tensor, A_log: Tensor, dt_bias: Tensor):
        g = log_decay(z, A_log.exp()[:, None], dt_bias, gate="bounded", lower_bound=-5.0)
        return function(unit(q), unit(k), v, g, beta_logit.sigmoid(), output_final_state=True)

    return run


def step(function: Callable[..., tuple[Tensor, Tensor]], tensors: list[Tensor], d_out: Tensor) -> tuple[float, Tensor]:
    """(seconds of one forward and backward pass, the output)."""
    for t in tensors:
        t.grad = None
    begin = time.perf_counter()
    out = function(*tensors)[0]
    out.backward(d_out)
    return time.perf_counter() - begin, out.detach()


def run(*, rounds: int = 5, repeats: int = 5, threads: int = 2) -> list[dict[str, Any]]:
    """One row a shape: medians in milliseconds and the ratios to ours. Each round runs every side, ours `repeats` times."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows = [_shape((1, 2048, 4, 64, 64), rounds, repeats, compare=True)]
        more = ((8, 512, 4, 64, 64), (8, 512, 3, 64, 64), (1, 8192, 4, 64, 64))
        return rows + [_shape(s, rounds, repeats, compare=False) for s in more]
    finally:
        torch.set_num_threads(before)


def _shape(shape: tuple[int, int, int, int, int], rounds: int, repeats: int, *, compare: bool) -> dict[str, Any]:
    sides: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"chunked": chunked.kda}
    if compare:
        from fla.ops.kda.naive import naive_chunk_kda, naive_recurrent_kda

        sides |= {"naive_chunk_kda": naive(naive_chunk_kda), "naive_recurrent_kda": naive(naive_recurrent_kda)}
    tensors = inputs(*shape)
    d_out = torch.randn(*shape[:3], shape[4], generator=torch.Generator().manual_seed(1))
    times: dict[str, list[float]] = {name: [] for name in sides}
    outs = {name: step(f, tensors, d_out)[1] for name, f in sides.items()}  # the first run is not counted
    for _ in range(rounds):
        for name, function in sides.items():
            times[name] += [step(function, tensors, d_out)[0] for _ in range(repeats if name == "chunked" else 1)]
    row: dict[str, Any] = {"shape": "B={} T={} H={} K={} V={}".format(*shape)}
    ours = statistics.median(times["chunked"])
    for name, values in times.items():
        row[f"{name}_ms"] = round(1000 * statistics.median(values), 1)
        if name != "chunked":
            row[f"x_{name}"] = round(statistics.median(values) / ours, 1)
            row[f"difference_{name}"] = f"{((outs[name] - outs['chunked']).norm() / outs[name].norm()).item():.1e}"
    return row


def main() -> None:
    print(f"torch {torch.__version__}, float32, 2 threads, forward + backward, medians")
    print("allocator: " + (" ".join(f"{n}={os.environ[n]}" for n in ALLOCATOR if n in os.environ) or "default"))
    for row in run():
        print("  ".join(f"{name} {value}" if name != "shape" else str(value) for name, value in row.items()))


if __name__ == "__main__":
    main()
