"""Newton-Schulz against the library's own, and what it promises beyond it: dtypes, zero blocks, bounded memory."""

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz as library

from kernels.newton_schulz import orthogonalise
from tests.golden.vectors import relative_error


def _blocks(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("shape", [(3, 16, 40), (3, 40, 16), (2, 24, 24), (4, 1, 8)])
@pytest.mark.parametrize("steps", [1, 5, 10])
@pytest.mark.parametrize(("name", "theirs"), [("quintic", "simple"), ("polar_express", "polar_express")])
def test_equals_the_library(shape: tuple[int, ...], steps: int, name: str, theirs: str) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        want = library(_blocks(*shape), steps, theirs)  # type: ignore[arg-type]
    finally:
        torch.set_float32_matmul_precision(before)
    assert relative_error(orthogonalise(_blocks(*shape), steps=steps, coefficients=name), want) < 1e-5


@pytest.mark.parametrize("shape", [(2, 12, 30), (2, 30, 12)])
def test_many_steps_reach_the_polar_factor(shape: tuple[int, ...]) -> None:
    blocks = _blocks(*shape, dtype=torch.float64)
    u, _, vh = torch.linalg.svd(blocks, full_matrices=False)
    # the coefficients are facts of 4 decimals, so the fixed point is 1 to about their rounding
    assert relative_error(orthogonalise(blocks, steps=20, coefficients="polar_express"), u @ vh) < 1e-3


def test_singular_values_end_near_one() -> None:
    values = torch.linalg.svdvals(orthogonalise(_blocks(3, 32, 256)))
    assert 0.6 < values.min() and values.max() < 1.3


def test_global_precision_does_not_reach_in() -> None:
    blocks = _blocks(2, 128, 256)
    want = orthogonalise(blocks)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        got = orthogonalise(blocks)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(got, want)


def test_dtypes() -> None:
    blocks = _blocks(2, 16, 32, dtype=torch.float64)
    want = orthogonalise(blocks)
    assert relative_error(orthogonalise(blocks.float()), want) < 1e-5
    half = orthogonalise(blocks.bfloat16())
    assert half.dtype == torch.bfloat16
    assert relative_error(half, orthogonalise(blocks.bfloat16().double())) < 4e-3  # one rounding at the end: float32 inside
    coarse = orthogonalise(blocks.float(), precision=torch.bfloat16)
    assert coarse.dtype == torch.float32
    assert 1e-3 < relative_error(coarse, want) < 0.1


def test_zero_and_tiny_blocks() -> None:
    blocks = torch.stack([torch.zeros(8, 16), _blocks(8, 16), _blocks(8, 16) * 1e-15, _blocks(8, 16) * 1e-5])
    out = orthogonalise(blocks)
    assert torch.equal(out[0], torch.zeros(8, 16))
    assert out[2].abs().max() < 1e-3  # noise below eps stays small
    assert relative_error(out[3], out[1]) < 1e-5  # each block has its own norm


@pytest.mark.parametrize("chunk", [1, 500, 10**9])
def test_chunks_do_not_change_the_result(chunk: int) -> None:
    blocks = _blocks(7, 8, 24, dtype=torch.float64)
    torch.testing.assert_close(orthogonalise(blocks, chunk_elements=chunk), orthogonalise(blocks), atol=1e-13, rtol=0)


def test_views_that_are_not_contiguous() -> None:
    blocks = _blocks(3, 20, 12, dtype=torch.float64)
    torch.testing.assert_close(orthogonalise(blocks[:, 4:12]), orthogonalise(blocks[:, 4:12].contiguous()), atol=1e-13, rtol=0)


def test_errors_name_the_fix() -> None:
    with pytest.raises(ValueError, match="leading axis"):
        orthogonalise(_blocks(4, 4))
    with pytest.raises(ValueError, match="one of quintic, polar_express"):
        orthogonalise(_blocks(1, 4, 4), coefficients="cubic")
    with pytest.raises(ValueError, match="steps=0"):
        orthogonalise(_blocks(1, 4, 4), steps=0)


@pytest.mark.parametrize("shape", [(2, 300, 420), (1, 420, 300), (1, 257, 257)])
@pytest.mark.parametrize("steps", [1, 4, 5])
def test_panels_equal_whole_products(shape: tuple[int, ...], steps: int) -> None:
    blocks = _blocks(*shape, dtype=torch.float64)
    got = orthogonalise(blocks, steps=steps, backend="panels")
    torch.testing.assert_close(got, orthogonalise(blocks, steps=steps, backend="batched"), atol=1e-12, rtol=0)
    assert torch.equal(got, orthogonalise(blocks, steps=steps))  # the one chosen here, and the same bits each time


@pytest.mark.parametrize(("precision", "rows", "bound"), [(None, 300, 1e-5), (torch.bfloat16, 520, 3e-2)])
def test_panels_in_lower_precision(precision: torch.dtype | None, rows: int, bound: float) -> None:
    blocks = _blocks(1, rows, rows + 40)
    got = orthogonalise(blocks, precision=precision, backend="panels")
    want = orthogonalise(blocks, precision=precision, backend="batched")
    assert relative_error(got, want) < bound
    assert torch.equal(got, orthogonalise(blocks, precision=precision))


def test_the_path_is_chosen_by_size_and_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.dispatch._said", set())
    with caplog.at_level("INFO", logger="k3.kernels"):
        for _ in range(2):
            orthogonalise(_blocks(2, 16, 40), steps=1)
            orthogonalise(_blocks(1, 256, 256), steps=1)
    assert caplog.messages == [
        "newton_schulz: batched (syrk refused: needs CUDA; panels refused: short sides below 256 are not worth cutting)",
        "newton_schulz: panels (syrk refused: needs CUDA)",
    ]
    with pytest.raises(ValueError, match="panels refused: short sides"):
        orthogonalise(_blocks(1, 8, 8), backend="panels")
    with pytest.raises(ValueError, match="there are syrk, panels, batched"):
        orthogonalise(_blocks(1, 8, 8), backend="cublas")
