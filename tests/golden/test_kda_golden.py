"""KDA against the golden vectors: both backends, float32 and float64, values and gradients."""

from __future__ import annotations

import pytest
import torch

from kernels.kda import kda
from tests.golden.vectors import load, relative_error

INPUTS = ("q", "k", "v", "z", "beta_logit", "A_log", "dt_bias")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("backend", ["recurrent", "chunked"])
@pytest.mark.parametrize("case", ["kda_short", "kda_ragged", "kda_floor"])
def test_kda_matches_the_golden_vectors(case: str, backend: str, dtype: torch.dtype) -> None:
    golden = load(case, dtype)
    given = {n: golden[n] if n in ("A_log", "dt_bias") else golden[n][None] for n in (*INPUTS, "initial_state") if n in golden}
    given = {n: t.clone().requires_grad_() for n, t in given.items()}
    out, final = kda(**given, backend=backend)
    torch.autograd.backward([out, final], [golden["d_out"][None], golden["d_final_state"][None]])

    outputs, gradients = (1e-5, 1e-4) if dtype == torch.float32 else (1e-6, 1e-6)
    assert relative_error(out[0].detach(), golden["out"]) < outputs
    assert relative_error(final[0].detach(), golden["final_state"]) < outputs
    for name, tensor in given.items():
        want = golden[f"grad_{name}"]
        assert torch.isfinite(tensor.grad).all(), name
        assert relative_error(tensor.grad.reshape(want.shape), want) < gradients, name
