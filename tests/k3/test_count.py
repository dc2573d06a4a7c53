"""Parameter counts of the published models, from the shapes alone (spec 1.2, 10.2)."""

from __future__ import annotations

import pytest
import torch

import k3


def counts(name: str) -> tuple[int, int]:
    """(all parameters, those active for one token); router biases count as parameters, as the report's do."""
    config = k3.preset(name)
    table = k3.cards(k3.build(config, device="meta", dtype=torch.bfloat16))
    total = active = 0
    for card_name, card in table.items():
        size = table.tensor(card_name).numel()
        total += size
        active += size * config.moe.top_k // config.moe.experts if card.blocks.per_expert else size
    return total, active


def test_k3_is_the_report_s() -> None:
    total, active = counts("k3")
    config = k3.preset("k3")
    assert total == pytest.approx(2779.48e9, rel=1e-5)
    assert total == pytest.approx(2.78e12, rel=1e-3)
    assert active - config.vocab_size * config.hidden_size == pytest.approx(104.2e9, rel=1e-3)


def test_kimi_linear_is_its_report_s() -> None:
    total, active = counts("linear_48b")
    assert total == pytest.approx(49.1e9, rel=2e-3)
    assert active == pytest.approx(3.48e9, rel=2e-3)


def test_small_is_about_a_billion() -> None:
    total, _ = counts("small")
    assert 0.8e9 < total < 1.2e9


@pytest.mark.parametrize("name", ["k3", "linear_48b", "tiny"])
def test_every_tensor_has_its_card_s_shape(name: str) -> None:
    table = k3.cards(k3.build(k3.preset(name), device="meta", dtype=torch.bfloat16))
    for card_name, card in table.items():
        assert tuple(table.tensor(card_name).shape) == card.shape
        assert table.tensor(card_name).dtype == card.dtype.resolve(torch.bfloat16)
        if card.blocks.is_matrix:
            assert sum(view.numel() for _, view in card.blocks.views(table.tensor(card_name))) == table.tensor(card_name).numel()
