"""What the operator tests share: tolerances, and gradients of two implementations on the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
# of the largest number in a tensor
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2e-2}


def close(a: Tensor, b: Tensor, dtype: torch.dtype, label: str = "") -> None:
    """Same shape, same dtype, and equal within the tolerance of `dtype`, relative to the largest number (at least 0.1)."""
    assert a.shape == b.shape and a.dtype == b.dtype, f"{label}: {a.dtype} {tuple(a.shape)} against {b.dtype} {tuple(b.shape)}"
    if a.numel():
        assert torch.isfinite(a).all(), f"{label}: not finite"
        error = (a.double() - b.double()).abs().max().item()
        scale = max(b.double().abs().max().item(), 0.1)
        assert error <= TOLERANCE[dtype] * scale, f"{label}: off by {error:.2e} of {scale:.2e}"


def same_with_gradients(
    fast: Callable[..., Sequence[Tensor]], slow: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], dtype: torch.dtype
) -> None:
    """Outputs of both, and the gradients of every input for one random gradient of the first differentiable outputs."""
    results = []
    for function in (fast, slow):
        leaves = [t.detach().requires_grad_() for t in inputs]
        outputs = list(function(*leaves))
        torch.manual_seed(1)
        wanted = [(out, torch.randn(out.shape, dtype=out.dtype)) for out in outputs if out.requires_grad]
        grads = torch.autograd.grad([o for o, _ in wanted], leaves, [d for _, d in wanted], materialize_grads=True)
        results.append(([o.detach() for o in outputs], grads))
    for i, (a, b) in enumerate(zip(results[0][0], results[1][0], strict=True)):
        close(a, b, dtype, f"output {i}")
    for i, (a, b) in enumerate(zip(results[0][1], results[1][1], strict=True)):
        close(a, b, dtype, f"gradient of input {i}")


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random numbers drawn in float64, so that one seed gives one set of numbers in every dtype."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)
