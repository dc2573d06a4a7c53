"""What the checks of `make gpu-check` share: how they compare, and how one of them asks a process without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ANY = 1e-30


class Skipped(Exception):
    """Why a check cannot run here."""


def distance(got: Tensor, want: Tensor) -> float:
    """Norm-relative, in float64 on the CPU."""
    a, b = got.detach().cpu().double(), want.detach().cpu().double()
    return ((a - b).norm() / b.norm().clamp_min(ANY)).item()


def disagreement(
    run: Callable[..., Any], inputs: dict[str, Tensor], device: torch.device, dtype: torch.dtype,
    exact: Callable[..., Any] | None = None, fp32: tuple[str, ...] = (),
) -> float:  # fmt: skip
    """The largest norm-relative difference of outputs and gradients between `run` here and `exact` in float64 on the CPU.

    Inputs are rounded to `dtype` (those of `fp32` to float32) for both; what is no floating-point tensor goes as it is.
    """

    def side(function: Callable[..., Any], where: torch.device, wide: bool) -> list[Tensor]:
        given = {}
        for name, x in inputs.items():
            if x.is_floating_point():
                x = x.to(torch.float32 if name in fp32 else dtype)
                x = (x.double() if wide else x).to(where).requires_grad_()
            given[name] = x.to(where) if not x.is_floating_point() else x
        out = function(**given)
        outs = [x for x in (out if isinstance(out, tuple) else (out,)) if x.requires_grad]
        draw = torch.Generator().manual_seed(1)
        pulls = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x) for x in outs]
        leaves = [x for x in given.values() if x.requires_grad]
        return [*outs, *torch.autograd.grad(outs, leaves, pulls)]

    got, want = side(run, device, False), side(exact or run, torch.device("cpu"), True)
    return max(distance(a, b) for a, b in zip(got, want, strict=True))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def starts(rows: int, length: int) -> Tensor:
    out = torch.zeros(rows, length, dtype=torch.bool)
    out[:, 0] = out[0, length // 3] = out[-1, length // 2] = out[-1, length // 2 + 1] = True
    return out


@contextmanager
def on_cpu(name: str, out: Path) -> Iterator[Callable[[], str]]:
    """Runs another check beside this one in a process that sees no GPU (the CPU backend stands aside where there is one).

    Calling what it gives waits for what the check returned.
    """
    words = [sys.executable, "-m", "recipes.gpu.rows", name, "cpu", str(out)]
    started = subprocess.Popen(words, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, stderr=subprocess.PIPE, text=True)

    def answer() -> str:
        _, said = started.communicate()
        if started.returncode or not out.is_file():
            raise RuntimeError(f"the CPU's side failed: {(said.strip().splitlines() or ['no message'])[-1]}")
        found = json.loads(out.read_text())
        assert found["state"] == "PASS", f"the CPU's side: {found['text']}"
        return found["text"]

    try:
        yield answer
    finally:
        started.kill()
        started.wait()
