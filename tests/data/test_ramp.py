"""A growing batch: no sample is left out or read twice, whoever reads, and a step's number is all that a resume needs."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import torch

from data import DataConfig, DataError, stream, validate
from data.batch import StepBatch
from data.config import RampConfig, batch_sizes, micro_batch, samples_of
from data.prepare import Prepared

RAMP = RampConfig(start=4, increment=4, samples=30)


def _rows(steps: list[StepBatch]) -> torch.Tensor:
    """The tokens of one step by all its readers, in the order of samples: micro-batch by micro-batch, rank by rank."""
    return torch.cat([micro.tokens for group in zip(*(s.micro_batches for s in steps)) for micro in group])


def test_sizes_grow_and_hold_for_equal_shares_of_the_samples() -> None:
    cfg = DataConfig(batch_size=12, ramp=RAMP)
    steps = [samples_of(cfg, step) for step in range(10)]
    assert [len(s) for s in steps] == [4, 4, 4, 4, 8, 8, 12, 12, 12, 12]  # 4 until 15 samples were read, 8 until 30
    assert batch_sizes(cfg) == [4, 8, 12] and micro_batch(cfg) == 4 and micro_batch(cfg, of=2) == 2


@pytest.mark.parametrize(
    "ramp", [RampConfig(), RAMP, RampConfig(2, None, 1), RampConfig(2, 5, 1000), RampConfig(11, 1, 7), RampConfig(1, None, 3)]
)
def test_every_sample_belongs_to_one_step(ramp: RampConfig) -> None:
    cfg = DataConfig(batch_size=12, ramp=ramp)
    read = 0
    for step in range(300):
        samples = samples_of(cfg, step)
        assert samples.start == read and samples.step == 1, step
        assert len(samples) in batch_sizes(cfg)
        if ramp.start and read < ramp.samples:  # megatron-core's rule
            sizes = batch_sizes(cfg)
            assert len(samples) == sizes[read * (len(sizes) - 1) // ramp.samples]
        else:
            assert len(samples) == cfg.batch_size
        read = samples.stop


@pytest.mark.parametrize(("of", "micro"), [(1, 1), (1, None), (2, 2), (4, 1)])
def test_the_union_of_ranks_is_the_stream_without_a_ramp(of: int, micro: int | None, cfg: DataConfig, prepared: Prepared) -> None:
    plain = torch.cat([_rows([step]) for step in islice(stream(replace(cfg, micro_batch_size=1), prepared), 6)])
    ramped = replace(cfg, ramp=RAMP, micro_batch_size=micro)
    ranks = [stream(ramped, prepared, rank=r, of=of) for r in range(of)]
    read = []
    for step in range(8):
        shares = [next(r) for r in ranks]
        assert {(s.index, s.tokens) for s in shares} == {(step, len(samples_of(ramped, step)) * cfg.seq_length)}
        read.append(_rows(shares))
        assert len(read[-1]) == len(samples_of(ramped, step))
    assert torch.equal(torch.cat(read), plain[: sum(map(len, read))])


@pytest.mark.parametrize("at", [1, 3, 5, 7])
def test_resuming_inside_the_ramp_is_going_on(at: int, cfg: DataConfig, prepared: Prepared) -> None:
    ramped = replace(cfg, ramp=RAMP)
    running = stream(ramped, prepared, rank=1, of=2)
    for _ in range(at):
        next(running)
    resumed = stream(ramped, prepared, rank=1, of=2, position=running.position)
    assert resumed.epoch == running.epoch == samples_of(ramped, at).start / len(running._samples)
    for a, b in islice(zip(running, resumed), 4):
        assert (a.index, a.tokens) == (b.index, b.tokens) and torch.equal(_rows([a]), _rows([b]))


@pytest.mark.parametrize(
    ("ramp", "message"),
    [
        (RampConfig(12, None, 9), r"data.ramp.start=12: must lie in 1..11, below data.batch_size; null grows nothing"),
        (RampConfig(0, None, 9), r"data.ramp.start=0: must lie in 1..11"),
        (RampConfig(4, 5, 9), r"data.ramp.increment=5: 4 \+ n x 5 never is data.batch_size=12; give a divisor of 8"),
        (RampConfig(4, 0, 9), r"data.ramp.increment=0: must be at least 1"),
        (RampConfig(4), r"data.ramp.samples=0: must be at least 1"),
        (RampConfig(6, 3, 9), r"data.ramp.increment=3: must be a multiple of data.micro_batch_size x data ranks = 1 x 2 = 2"),
        (RampConfig(3, 9, 9), r"data.ramp.start=3: must be a multiple of .* = 1 x 2 = 2, as every size of the batch is"),
    ],
)
def test_a_ramp_that_cannot_be_followed_is_refused(ramp: RampConfig, message: str) -> None:
    with pytest.raises(DataError, match=message):
        validate(DataConfig(batch_size=12, ramp=ramp), of=2)
