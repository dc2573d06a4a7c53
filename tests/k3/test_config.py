"""Contradictory configurations are refused with the field, the value and the rule; presets are whole and independent."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from k3.config import ConfigError, K3Config
from k3.presets import PRESETS, preset


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_and_fresh(name: str) -> None:
    first = preset(name)
    first.moe.experts = 3
    assert preset(name).moe.experts != 3


def test_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"model=nanoo.*tiny, nano"):
        preset("nanoo")


BROKEN = {
    "residual_block=0": lambda c: replace(c, residual_block=0),
    "hidden_size=63": lambda c: replace(c, hidden_size=63),
    "layers=0": lambda c: replace(c, layers=0),
    "dense_layers=10": lambda c: replace(c, dense_layers=10),
    "mtp_layers=-1": lambda c: replace(c, mtp_layers=-1),
    "kda.heads=0": lambda c: replace(c, kda=replace(c.kda, heads=0)),
    "kda.lower_bound=-5.5": lambda c: replace(c, kda=replace(c.kda, lower_bound=-5.5)),
    "kda.lower_bound=0.0": lambda c: replace(c, kda=replace(c.kda, lower_bound=0.0)),
    "mla.q_lora_rank=0": lambda c: replace(c, mla=replace(c.mla, q_lora_rank=0)),
    "moe.top_k=17": lambda c: replace(c, moe=replace(c.moe, top_k=17)),
    "moe.top_k=0": lambda c: replace(c, moe=replace(c.moe, top_k=0)),
    "moe.latent_size=0": lambda c: replace(c, moe=replace(c.moe, latent_size=0)),
    "moe.ema=1.0": lambda c: replace(c, moe=replace(c.moe, ema=1.0)),
}


@pytest.mark.parametrize("case", BROKEN)
def test_contradictions_are_named(case: str) -> None:
    broken: K3Config = BROKEN[case](preset("tiny"))
    with pytest.raises(ConfigError) as caught:
        broken.validate()
    assert f"model.{case}: must" in str(caught.value)


def test_all_contradictions_come_at_once() -> None:
    c = preset("tiny")
    broken = replace(c, layers=0, kda=replace(c.kda, lower_bound=1.0))
    with pytest.raises(ConfigError) as caught:
        broken.validate()
    assert "model.layers=0" in str(caught.value) and "model.kda.lower_bound=1.0" in str(caught.value)


def test_pattern_is_three_to_one_with_a_last_mla() -> None:
    c = preset("k3")
    mla = [i + 1 for i in range(c.layers) if c.is_mla(i)]
    assert mla == [*range(4, 93, 4), 93] and len(mla) == 24
    assert [preset("tiny").is_mla(i) for i in range(9)] == [False, False, False, True] * 2 + [True]


def test_configuration_is_read_without_torch() -> None:
    code = "import sys, k3.config, k3.presets, parallel.config, optim.config, data.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
