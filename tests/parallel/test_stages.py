"""Splits of layers and groups of micro-batches: what fits is taken, what does not is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.config import ParallelConfig, ParallelError, check_sizes
from parallel.stages import RowPlan, bubble, group_size, split_layers


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 4))
def test_an_even_split_covers_every_layer_once(layers: int, pp: int, vpp: int) -> None:
    count = pp * vpp
    try:
        split = split_layers(layers, ParallelConfig(pp=pp, vpp=vpp))
    except ParallelError:
        assert layers < count
        return
    assert [layer for of in split for layer in of] == list(range(layers)) and len(split) == count
    sizes = [len(of) for of in split]
    assert max(sizes) - min(sizes) <= 1 and sizes[-1] == min(sizes), "the last stage has the head besides"


def test_the_largest_model_splits() -> None:
    sizes = [len(of) for of in split_layers(93, ParallelConfig(pp=16, vpp=2))]
    assert sum(sizes) == 93 and sizes[-1] == 2 and set(sizes) == {2, 3}


@pytest.mark.parametrize(
    "split, message",
    [
        ([3, 3], r"parallel.split=\[3,3\]: 2 numbers for pp \* vpp = 2 \* 2 = 4 stages"),
        ([3, 3, 3, 3], r"adds up to 12, and the model has 9 layers; give 9 in all"),
        ([10, -1, 0, 0], r"-1 layers; no number may be below 0"),
        ([4, 0, 4, 1], r"number 2 of 4 is 0; only the first \(embedding\) and the last \(head\) stage may have no layers"),
    ],
)
def test_splits_that_do_not_fit_are_named(split: list[int], message: str) -> None:
    with pytest.raises(ParallelError, match=message):
        split_layers(9, ParallelConfig(pp=2, vpp=2, split=split))


def test_ends_without_layers_are_taken() -> None:
    assert [len(of) for of in split_layers(9, ParallelConfig(pp=2, vpp=2, split=[0, 5, 4, 0]))] == [0, 5, 4, 0]


@pytest.mark.parametrize(
    "pp, micro_batches, group", [(2, 2, 2), (4, 8, 4), (4, 9, 5), (4, 6, 6), (4, 7, 7), (3, 8, 4), (2, 7, 4)]
)
def test_the_smallest_group_that_leaves_no_short_rest(pp: int, micro_batches: int, group: int) -> None:
    """A rest of fewer than pp micro-batches is what megatron-core refuses."""
    assert group_size(ParallelConfig(pp=pp, vpp=2), micro_batches) == group
    assert micro_batches % group == 0 or micro_batches % group >= pp


def test_groups_that_do_not_fit_are_named() -> None:
    with pytest.raises(ParallelError, match=r"has 2 micro-batches, and virtual stages need at least pp = 4"):
        group_size(ParallelConfig(pp=4, vpp=2), 2)
    with pytest.raises(ParallelError, match=r"parallel.group=5: .* leave none or at least 4 over; give 6"):
        group_size(ParallelConfig(pp=4, vpp=2, group=5), 6)
    assert group_size(ParallelConfig(pp=4, vpp=2, group=5), 9) == 5


@pytest.mark.parametrize(
    "config, message",
    [
        (ParallelConfig(vpp=2), "parallel.vpp=2: virtual stages need parallel.pp of at least 2"),
        (ParallelConfig(pp=2, overlap_warmup=True), "parallel.overlap_warmup=true: only virtual stages overlap"),
        (ParallelConfig(pp=2, group=2), "parallel.group=2: has a meaning between virtual stages alone"),
        (ParallelConfig(pp=2, zero=2), "parallel.zero=2: with one stage a rank"),
        (
            ParallelConfig(pp=2, vpp=2, dp=1, zero=2),
            "parallel.zero=2: cuts gradients over data and context ranks, and there is one",
        ),
        (ParallelConfig(zero=3), "parallel.zero=3: give 0, 1 or 2"),
        (ParallelConfig(offload_gradients=True), "parallel.offload_gradients=true: has no effect with parallel.zero=1"),
        (ParallelConfig(pp=0), "parallel.pp=0: must be at least 1"),
    ],
)
def test_contradictions_are_named(config: ParallelConfig, message: str) -> None:
    with pytest.raises(ParallelError) as caught:
        check_sizes(config)
    assert message in str(caught.value)


def test_a_plan_sends_what_is_new_to_the_next_rank() -> None:
    plan = RowPlan(made=(1, 2, 3, 4, 5, 6, 7, 8), pp=4)
    assert [plan.sent(stage) for stage in range(8)] == [1, 2, 3, 3, 3, 3, 3, 0]
    assert [plan.kept(stage) for stage in range(8)] == [0, 0, 0, 0, 1, 2, 3, 4]
    plain = RowPlan(made=(0, 0, 0, 0), pp=2)
    assert [plain.sent(stage) for stage in range(4)] == [0, 0, 0, 0]


def test_the_bubble_shrinks_with_micro_batches_and_virtual_stages() -> None:
    assert bubble(ParallelConfig(), 1) == 0
    assert bubble(ParallelConfig(pp=4), 1) == pytest.approx(3 / 4)
    assert bubble(ParallelConfig(pp=4), 12) == pytest.approx(3 / 15)
    assert bubble(ParallelConfig(pp=4, vpp=2), 12) == pytest.approx(3 / 27)
