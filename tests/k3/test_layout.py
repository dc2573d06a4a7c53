"""Parallel sizes that do not fit a model are named before anything starts."""

from __future__ import annotations

import pytest

import k3
from k3.layout import check_layout
from parallel.config import ParallelConfig, ParallelError


@pytest.mark.parametrize(
    "sizes, length, message",
    [
        ({"tp": 3}, None, r"parallel\.tp=3: must divide model\.kda\.heads = 4, .*, model\.vocab_size = 256; 2 divides all"),
        ({"tp": 8}, None, r"parallel\.tp=8: must divide model\.kda\.heads = 4, model\.mla\.heads = 4; 4 divides all"),
        ({"ep": 3}, None, r"parallel\.ep=3: must divide model\.moe\.experts = 16; 2 does"),
        ({"tp": 2, "cp": 3}, 64, r"cp=3 and parallel\.tp=2: the 64 tokens .* cp \* tp = 6; give rows of 66"),
        ({"cp": 32}, 64, r"parallel\.cp=32: leaves 2 of 64 tokens a rank, and the convolutions reach 3 back"),
    ],
)
def test_misfits_are_named(sizes: dict, length: int | None, message: str) -> None:
    with pytest.raises(ParallelError, match=message):
        check_layout(k3.preset("tiny"), ParallelConfig(**sizes), length=length)


def test_every_reason_is_in_the_one_message() -> None:
    with pytest.raises(ParallelError) as caught:
        check_layout(k3.preset("tiny"), ParallelConfig(tp=3, ep=5), length=64)
    assert len(str(caught.value).splitlines()) == 3


def test_a_dense_model_has_no_experts_to_spread() -> None:
    with pytest.raises(ParallelError, match=r"parallel\.ep=2: model\.moe\.experts=0 has no experts"):
        check_layout(k3.preset("dense"), ParallelConfig(ep=2))


def test_the_release_fits_what_its_report_runs() -> None:
    check_layout(k3.preset("k3"), ParallelConfig(ep=64, cp=4, dp=16), length=8192)
    check_layout(k3.preset("k3"), ParallelConfig(tp=8, ep=8), length=4096)
