"""What `k3 bench owners` measures keeps the bounds that it prints, and the naive form does not."""

from __future__ import annotations

import pytest
import torch

from optim.config import Distribution
from parallel.local import Helper
from recipes.bench.owners import Measured, model
from recipes.live_bytes import LiveBytes


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4, 8])
def test_owners_send_and_hold_little_and_share_the_work(helper: Helper, size: int) -> None:
    owners, gathered = (
        helper.run_ranks("recipes.bench.owners:on_rank", size, model(), size, form, timeout=600) for form in Distribution
    )
    one: Measured
    for one in owners:
        assert one.sent <= 2 * one.total / size
        assert one.imbalance <= 1.1
        assert one.peak <= one.owned + one.buffer
    assert sum(one.owned for one in owners) == owners[0].total
    for one in gathered:
        assert one.sent >= one.total * (size - 1) / size and one.owned == one.total
        assert one.sent > max(other.sent for other in owners) * 4
        assert one.peak > one.total


def test_live_bytes_are_those_of_new_storages_at_their_peak() -> None:
    old = torch.ones(1000)
    with LiveBytes() as live:
        old.add_(1)
        first = old * 2
        view = first[10:]
        del first, view
        second = torch.cat([old, old])
        del second
        old[:10].clone()
    assert live.peak == 8000
