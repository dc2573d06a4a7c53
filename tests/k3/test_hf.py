"""The published layout: names, precisions, the A_log padding, MTP, and what a damaged folder says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import k3
from k3 import hf
from k3.config import ConfigError
from k3.hf_config import from_published, to_published
from tests.golden.vectors import FOLDER
from tests.k3.randomise import randomise


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    hf.save(randomise(k3.build(k3.preset("tiny"), dtype=torch.bfloat16)), tmp_path / "m")
    return tmp_path / "m"


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    table = k3.cards(model)
    return {n: table.tensor(n) for n in table}


def test_round_trip_keeps_every_value_and_precision(saved: Path, tmp_path: Path) -> None:
    model = hf.load(saved)
    hf.save(model, tmp_path / "again", shard_bytes=200_000)
    assert (tmp_path / "again" / hf.INDEX).is_file()
    other = state(hf.load(tmp_path / "again"))
    original = state(randomise(k3.build(k3.preset("tiny"), dtype=torch.bfloat16)))
    for name, value in state(model).items():
        assert value.dtype == other[name].dtype == original[name].dtype, name
        assert torch.equal(value, other[name]) and torch.equal(value, original[name]), name


def test_release_s_fp32_tensors_stay_fp32(saved: Path) -> None:
    kept = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
    for name, value in load_file(saved / "model.safetensors").items():
        assert value.dtype == (torch.float32 if name.endswith(kept) else torch.bfloat16), name


def test_mtp_is_exported_or_left_out_on_request(saved: Path, tmp_path: Path) -> None:
    names = set(load_file(saved / "model.safetensors"))
    assert "language_model.mtp.0.eh_proj.weight" in names and "language_model.mtp.0.self_attn.kv_b_proj.weight" in names
    model = hf.load(saved)
    hf.save(model, tmp_path / "without", mtp=False)
    assert not any(".mtp." in n for n in load_file(tmp_path / "without" / "model.safetensors"))
    without = hf.load(tmp_path / "without")
    assert without.k3.mtp_layers == 0
    x = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(without(x), model(x))


def test_a_log_length(tmp_path: Path) -> None:
    """96 heads are written as 128 entries; what was read padded is written padded the same; other counts are not padded."""
    c = k3.preset("tiny")
    wide = replace(c, layers=2, mtp_layers=0, kda=replace(c.kda, heads=96, head_dim=16))
    hf.save(k3.build(wide), tmp_path / "wide")
    name = "language_model.model.layers.0.self_attn.A_log"
    tensors = load_file(tmp_path / "wide" / "model.safetensors")
    assert tensors[name].shape == (128,) and not tensors[name][96:].any()
    tensors[name] = torch.cat([tensors[name][:96], torch.zeros(14)])
    save_file(tensors, tmp_path / "wide" / "model.safetensors")
    hf.save(hf.load(tmp_path / "wide"), tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors")[name].shape == (110,)
    hf.save(k3.build(replace(c, layers=2, mtp_layers=0)), tmp_path / "narrow")
    assert load_file(tmp_path / "narrow" / "model.safetensors")[name].shape == (4,)


def test_damaged_folders_list_names(saved: Path, tmp_path: Path) -> None:
    tensors = load_file(saved / "model.safetensors")

    def refused(changed: dict[str, torch.Tensor]) -> str:
        save_file(changed, saved / "model.safetensors")
        with pytest.raises(hf.CheckpointError) as caught:
            hf.load(saved)
        return str(caught.value)

    norm = "language_model.model.norm.weight"
    assert f"missing: {norm}" in refused({k: v for k, v in tensors.items() if k != norm})
    assert "not part of this model: surprise" in refused(tensors | {"surprise": torch.zeros(1)})
    assert f"misshapen: {norm} is [3], config.json says [64]" in refused(tensors | {norm: torch.zeros(3)})
    (saved / "model.safetensors").write_bytes(b"\x80\x04 not a tensor file")
    with pytest.raises(hf.CheckpointError, match="not a readable safetensors file"):
        hf.load(saved)
    (saved / "model.safetensors").unlink()
    with pytest.raises(hf.CheckpointError, match="neither model"):
        hf.load(saved)
    with pytest.raises(hf.CheckpointError, match=r"no config\.json"):
        hf.load(tmp_path / "nowhere")


def test_save_never_overwrites(saved: Path) -> None:
    with pytest.raises(hf.CheckpointError, match="exists already"):
        hf.save(k3.build(k3.preset("tiny")), saved)


def test_configuration_round_trip_and_refusals() -> None:
    for name in ("tiny", "k3", "linear_48b"):
        c = k3.preset(name)
        again = from_published(to_published(c))
        assert to_published(again) == to_published(c)
        assert (again.kda, again.mla, again.layers, again.residual) == (c.kda, c.mla, c.layers, c.residual)
    document = json.loads((FOLDER / "config.json").read_text())
    document["text_config"]["mla_use_nope"] = False
    with pytest.raises(ConfigError, match="mla_use_nope"):
        from_published(document)
    del document["text_config"]["vocab_size"]
    document["text_config"]["mla_use_nope"] = True
    with pytest.raises(ConfigError, match="vocab_size"):
        from_published(document)
    document["text_config"] |= {"vocab_size": 256}
    document["text_config"]["linear_attn_config"]["kda_layers"] = [1, 2]
    with pytest.raises(ConfigError, match="kda_layers"):
        from_published(document)
