"""Parts of parallel runs that a proof of whole steps does not show by itself."""

from __future__ import annotations

import pytest
import torch

from parallel.config import ParallelConfig, world_size
from parallel.local import Helper
from tests.equivalence.proofs import config


@pytest.mark.parametrize("length", [16, 23])
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 2, "sp": False}, {"cp": 2}, {"tp": 2, "cp": 2, "ep": 4}])
def test_every_rank_has_the_logits_of_the_single_process(sizes: dict, length: int, helper: Helper) -> None:
    """Of rows of any length: without labels the model fills them up itself."""
    (want, text), *_ = helper.run_ranks("tests.equivalence.ranks:logits", 1, {}, length)
    for got, same in helper.run_ranks("tests.equivalence.ranks:logits", world_size(ParallelConfig(**sizes)), sizes, length):
        assert got.shape == (2, length, 256)
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
        assert same == text


def test_gradients_are_reduced_while_the_backward_pass_runs(helper: Helper) -> None:
    """In every bucket, that of the parameter nobody reads included; megatron-core learns the order in the first step."""
    cfg = config("parallel.dp=2 parallel.ep=2 parallel.bucket=20000 prove.steps=3 prove.accumulation=2 prove.length=32")
    for steps in helper.run_ranks("tests.equivalence.ranks:reductions_begun", 2, cfg):
        (_, groups), *later = steps
        assert groups > 4
        assert later == [(groups, groups)] * 2


@pytest.mark.parametrize("cp", [2, 4])
def test_context_operations_have_exact_gradients(cp: int, helper: Helper) -> None:
    """Each against the same operation on the whole tensor in one process."""
    length = 24
    (one,) = helper.run_ranks("tests.equivalence.ranks:context_operations", 1, 1, length)
    ranks = helper.run_ranks("tests.equivalence.ranks:context_operations", cp, cp, length)
    own = length // cp
    whole = torch.randn(length, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for rank, got in enumerate(ranks):
        assert torch.equal(got["past"], whole[: (rank + 1) * own])
        # every rank that sees a token weighs it with its place and with the rank's number + 1
        seen = sum(r + 1 for r in range(rank, cp))
        place = torch.arange(length * 3, dtype=torch.float64).view(length, 3)[rank * own : (rank + 1) * own]
        assert torch.equal(got["d_past"], place * seen)
        assert torch.equal(got["before"], torch.zeros_like(got["before"])) == (rank == 0)
        d_before = torch.zeros(own, 3, dtype=torch.float64)
        d_before[-2:] = rank + 2 if rank + 1 < cp else 0
        assert torch.equal(got["d_before"], d_before)
    for name in ("kda", "d_q", "d_k", "d_v", "d_z", "d_beta"):
        torch.testing.assert_close(torch.cat([r[name] for r in ranks], 1), one[name], rtol=1e-11, atol=1e-12)
