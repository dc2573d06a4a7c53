"""Where the golden vectors are and how they are read: the folder of the repository, or the one named by K3_GOLDEN."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import load_file

FOLDER = Path(os.environ.get("K3_GOLDEN") or Path(__file__).parent / "k3_tiny")


def load(name: str, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """The tensors of `<FOLDER>/<name>.safetensors`; floating-point ones cast to `dtype` where it is given."""
    tensors = load_file(FOLDER / f"{name}.safetensors")
    if dtype is None:
        return tensors
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in tensors.items()}


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm-relative difference, in float64."""
    got, want = got.double(), want.double()
    return ((got - want).norm() / want.norm().clamp_min(1e-30)).item()
