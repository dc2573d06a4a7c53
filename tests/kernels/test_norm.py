"""RMSNorm against its definition."""

import pytest
import torch

from kernels.norm import gated_rms_norm, gated_rms_norm_reference, rms_norm, rms_norm_reference


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("gated", [False, True])
def test_equals_definition(dtype: torch.dtype, tolerance: float, gated: bool) -> None:
    torch.manual_seed(0)
    x = (torch.randn(3, 5, 16, dtype=dtype) * 3).requires_grad_()
    gate = torch.randn(3, 5, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(16, dtype=dtype, requires_grad=True)
    upstream = torch.randn(3, 5, 16, dtype=dtype)
    inputs = [x, weight, gate] if gated else [x, weight]
    if gated:
        got, want = gated_rms_norm(x, gate, weight, eps=1e-5), gated_rms_norm_reference(x, gate, weight, eps=1e-5)
    else:
        got, want = rms_norm(x, weight, eps=1e-5), rms_norm_reference(x, weight, eps=1e-5)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    for a, b in zip(torch.autograd.grad(got, inputs, upstream), torch.autograd.grad(want, inputs, upstream), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_float32_weight_under_bf16_keeps_its_precision() -> None:
    x = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    gate = torch.randn(4, 8, dtype=torch.bfloat16)
    weight = torch.full((8,), 1.001, requires_grad=True)
    out = gated_rms_norm(x, gate, weight, eps=1e-5)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert (
        weight.grad is not None and weight.grad.dtype == torch.float32 and x.grad is not None and x.grad.dtype == torch.bfloat16
    )


def test_eps_counts() -> None:
    x = torch.full((1, 4), 1e-3, dtype=torch.float64)
    weight = torch.ones(4, dtype=torch.float64)
    assert rms_norm(x, weight, eps=1e-5)[0, 0].item() == pytest.approx(1e-3 / (1e-6 + 1e-5) ** 0.5, rel=1e-12)
