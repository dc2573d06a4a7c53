"""Newton-Schulz against the golden momentum, whole and per head."""

import pytest
import torch

from kernels.newton_schulz import orthogonalise
from tests.golden import vectors


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-6)])
def test_quintic_whole_and_per_head(dtype: torch.dtype, tolerance: float) -> None:
    golden = vectors.load("newton_schulz", dtype)
    momentum, heads = golden["momentum"], int(golden["heads"])
    whole = orthogonalise(momentum.unsqueeze(0))[0]
    per_head = orthogonalise(momentum.view(heads, -1, momentum.shape[1])).view_as(momentum)
    assert whole.dtype == per_head.dtype == dtype
    assert vectors.relative_error(whole, golden["whole"]) < tolerance
    assert vectors.relative_error(per_head, golden["per_head"]) < tolerance
    assert vectors.relative_error(per_head, golden["whole"]) > 0.01
