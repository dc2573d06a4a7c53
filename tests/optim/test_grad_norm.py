"""The global gradient norm and its clip coefficient."""

import pytest
import torch

from optim.grad_norm import clip_coefficient, squared_norm


def _gradients(*dtypes: torch.dtype) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(37, 11 + i, generator=gen, dtype=torch.float64).to(d) for i, d in enumerate(dtypes)]


def test_equals_one_long_vector() -> None:
    for dtypes in ([torch.float32] * 3, [torch.float64] * 3, [torch.bfloat16, torch.float32, torch.bfloat16]):
        grads = _gradients(*dtypes)
        got = squared_norm(grads)
        assert got.dtype == torch.float64  # tensors are added up in it, whatever theirs is
        want = torch.cat([g.double().flatten() for g in grads]).square().sum()
        assert float(got) == pytest.approx(float(want), rel=1e-14 if torch.float64 in dtypes else 1e-6)
    assert float(squared_norm([])) == 0.0


def test_bf16_is_summed_in_float32() -> None:
    assert float(squared_norm([torch.ones(1 << 16, dtype=torch.bfloat16)])) == 65536.0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_one_bad_number_shows(bad: float) -> None:
    grads = _gradients(torch.float32, torch.bfloat16)
    grads[1][3, 4] = bad
    assert not torch.isfinite(squared_norm(grads))


def test_coefficient() -> None:
    assert clip_coefficient(4.0, 1.0) == 0.25
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(0.0, 1.0) == 1.0
    assert clip_coefficient(4.0, 0.0) == 1.0  # off
