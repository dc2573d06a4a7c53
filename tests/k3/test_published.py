"""Published folders through a model and back, byte for byte: packed or not, in one process and under layouts."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import k3
from k3 import hf
from k3.cards import describe
from k3.hf.export import Options
from kernels.mx import dequantise, unpack_mxfp4
from parallel.local import Helper
from tests.golden.vectors import FOLDER
from tests.k3.published import bytes_of, golden, through

HERE = "tests.k3.published"
LAYOUTS = {
    "TP2": {"tp": 2},
    "PP2 EP2": {"pp": 2, "ep": 2, "dp": 2},
    "TP2 CP2 DP2 EP4": {"tp": 2, "cp": 2, "dp": 2, "ep": 4},
    "PP2 VPP2 TP2": {"pp": 2, "vpp": 2, "tp": 2, "group": 2},
}


def options(packed: bool, path: Path) -> dict:
    return {"quantise": "mxfp4" if packed else None, "passthrough": str(path)}


@pytest.mark.parametrize("packed", [False, True])
def test_import_and_export_are_byte_identical(packed: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = golden(tmp_path / "released", packed=packed)
    with caplog.at_level(logging.INFO, "k3.hf"):
        through({}, str(path), str(tmp_path / "again"), options(packed, path))
    assert "3 tensors of mm_projector, vision_tower" in caplog.text
    # the file, too: the library's order of tensors is ours
    assert (tmp_path / "again" / hf.SINGLE).read_bytes() == (path / hf.SINGLE).read_bytes()
    assert (tmp_path / "again/config.json").read_bytes() == (path / "config.json").read_bytes()


def test_what_this_writes_in_shards_comes_back_as_the_same_files(tmp_path: Path) -> None:
    path = golden(tmp_path / "released", packed=True)
    for name, source in (("one", path), ("two", tmp_path / "one")):
        hf.save(hf.load(source), tmp_path / name, shard_bytes=100_000, quantise="mxfp4", passthrough=source)
    files = sorted(f.name for f in (tmp_path / "one").iterdir())
    assert len(files) > 5 and files == sorted(f.name for f in (tmp_path / "two").iterdir())
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file
    index = json.loads((tmp_path / "one" / hf.INDEX).read_text())
    sizes = hf.contents(tmp_path / "one").shards
    assert set(sizes) == set(index["weight_map"].values()) and max(sizes.values()) <= 100_000
    assert index["metadata"]["total_size"] == sum(sizes.values())


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "TP2")) for n in LAYOUTS])
@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_same_under_a_layout(name: str, packed: bool, tmp_path: Path, helper: Helper) -> None:
    path = golden(tmp_path / "released", packed=packed)
    sizes = LAYOUTS[name]
    ranks = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1) * sizes.get("dp", 1)
    sums = helper.run_ranks(f"{HERE}:through", ranks, sizes, str(path), str(tmp_path / "again"), options(packed, path))
    assert (tmp_path / "again" / hf.SINGLE).read_bytes() == (path / hf.SINGLE).read_bytes()
    assert len({tuple(s.items()) for s in sums}) > 1, "every rank held the same"


def test_a_rank_reads_its_own_part_alone(tmp_path: Path, helper: Helper) -> None:
    path = golden(tmp_path / "released", packed=False)
    experts = hf.contents(path).parts["expert"].nbytes
    ((whole, held),) = helper.run_ranks(f"{HERE}:reading", 1, {}, str(path))
    assert whole == held
    for read, held in helper.run_ranks(f"{HERE}:reading", 2, {"tp": 2}, str(path)):
        assert read - held == 5 * 2 * 4, "of A_log, two floats a layer, all heads are read"
    for read, held in helper.run_ranks(f"{HERE}:reading", 2, {"dp": 2, "ep": 2}, str(path)):
        assert read == held == whole - experts // 2


@pytest.mark.slow
def test_mtp_and_its_copy_of_the_embedding_under_pipelines(tmp_path: Path, helper: Helper) -> None:
    hf.save(k3.build(k3.preset("tiny"), dtype=torch.bfloat16), tmp_path / "one")
    sizes = {"pp": 2, "ep": 2, "dp": 2}
    sums = helper.run_ranks(f"{HERE}:through", 4, sizes, str(tmp_path / "one"), str(tmp_path / "again"), {})
    assert (tmp_path / "again" / hf.SINGLE).read_bytes() == (tmp_path / "one" / hf.SINGLE).read_bytes()
    assert sum("embedding.weight" in s for s in sums) == 4 and len({s["embedding.weight"] for s in sums}) == 1
    assert sum("mtp.0.eh_proj.weight" in s for s in sums) == 2


def test_a_failure_is_raised_on_every_rank_and_leaves_nothing(tmp_path: Path, helper: Helper) -> None:
    path = golden(tmp_path / "released", packed=True)
    said = helper.run_ranks(f"{HERE}:refused", 2, {"ep": 2, "dp": 2}, str(path), str(tmp_path / "bad"))
    for of in said:
        first, second = of.splitlines()
        assert "exists already" in first
        assert "layers.2.block_sparse_moe.experts.3.w2.weight holds NaN" in second
    assert [f.name for f in tmp_path.iterdir()] == ["released"]


def test_packed_weights_load_exactly(tmp_path: Path) -> None:
    path = golden(tmp_path / "released", packed=True)
    tensors = load_file(path / hf.SINGLE)
    model = hf.load(path)
    name = "language_model.model.layers.1.block_sparse_moe.experts.3.{}.weight"
    f = model.k3.moe.expert_size
    for w, value in zip(("w1", "w3"), model.layers["1"].feed_forward.experts.gate_up[3].split(f)):
        packed, scale = (tensors[f"{name.format(w)}_{part}"] for part in ("packed", "scale"))
        want = dequantise(unpack_mxfp4(packed), scale, "mxfp4", torch.float64)
        assert value.dtype == torch.bfloat16 and torch.equal(value.double(), want)
        assert torch.equal(torch.signbit(value), torch.signbit(want)), "-0.0"


def test_without_the_scales_it_came_with_values_stay_and_bytes_need_not(tmp_path: Path) -> None:
    """A block's values do not tell its scale: identity needs the model's scales, or those of the imported folder."""
    path = golden(tmp_path / "released", packed=True)
    model = hf.load(path)
    model.origin.scales.clear()
    hf.save(model, tmp_path / "alone", quantise="mxfp4")
    one, other = bytes_of(path), bytes_of(tmp_path / "alone")
    assert {n for n in one if EXPERT_PART in n and one[n] != other[n]}, "this checkpoint has no block that fits under two scales"
    again = hf.load(tmp_path / "alone")
    for (name, a), b in zip(model.named_parameters(), again.parameters()):
        assert torch.equal(a, b), name
    hf.save(model, tmp_path / "beside", quantise="mxfp4", passthrough=path)
    assert bytes_of(tmp_path / "beside") == one


EXPERT_PART = ".experts."


def test_trained_blocks_are_packed_anew_and_untouched_ones_are_not(tmp_path: Path) -> None:
    path = golden(tmp_path / "released", packed=True)
    model = hf.load(path)
    with torch.no_grad():
        model.layers["1"].feed_forward.experts.down[2, 5, :32] += 0.7
    hf.save(model, tmp_path / "again", quantise="mxfp4", passthrough=path)
    one, other = bytes_of(path), bytes_of(tmp_path / "again")
    changed = {n for n in one if one[n] != other[n]}
    assert {n.rsplit("_", 1)[0] for n in changed} == {"language_model.model.layers.1.block_sparse_moe.experts.2.w2.weight"}


def test_quantising_follows_the_rule_and_is_said_in_the_configuration(tmp_path: Path) -> None:
    hf.save(hf.load(FOLDER), tmp_path / "rceil", quantise="mxfp4")
    hf.save(hf.load(FOLDER), tmp_path / "floor", quantise="mxfp4", scale_rule="floor")
    one, other = (load_file(tmp_path / n / hf.SINGLE) for n in ("rceil", "floor"))
    assert {n: t.dtype for n, t in one.items()} == {n: t.dtype for n, t in other.items()}
    scales = [n for n in one if n.endswith("_scale")]
    assert len(scales) == 6 * 8 * 3 and any(not torch.equal(one[n], other[n]) for n in scales)
    text = json.loads((tmp_path / "rceil/config.json").read_text())["text_config"]
    assert text["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] == 32
    # loaded, and written in full: no packed tensor and no word of it is left
    hf.save(hf.load(tmp_path / "rceil", dtype=torch.bfloat16), tmp_path / "full", passthrough=tmp_path / "rceil")
    assert "quantization_config" not in (tmp_path / "full/config.json").read_text()
    assert not any("_packed" in n for n in load_file(tmp_path / "full" / hf.SINGLE))


def test_a_folder_becomes_another_without_a_model(tmp_path: Path) -> None:
    path = golden(tmp_path / "released", packed=True)
    hf.convert(path, tmp_path / "plain")
    plain = load_file(tmp_path / "plain" / hf.SINGLE)
    assert not any(n.endswith("_packed") for n in plain) and "vision_tower.position" in plain
    a, b = hf.load(path), hf.load(tmp_path / "plain")
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))
    hf.convert(path, tmp_path / "packed", quantise="mxfp4", shard_bytes=50_000)
    assert bytes_of(tmp_path / "packed") == bytes_of(path)


def test_any_holder_of_regions_is_a_source_and_a_sink(tmp_path: Path) -> None:
    """As a checkpoint of another kind would be: this one holds the second half of everything's first axis."""

    class Held:
        def __init__(self) -> None:
            self.cards = describe(hf.contents(path).config)
            self.tensors = {n: torch.full(c.shape, torch.nan) for n, c in self.cards.items()}

        def region(self, name: str) -> hf.Region | None:
            first, *rest = self.cards[name].shape
            return None if name.endswith("o_norm.weight") else ((first // 2, first), *((0, n) for n in rest))

        def write(self, name: str, region: hf.Region, value: torch.Tensor, scale: torch.Tensor | None) -> None:
            self.tensors[name][tuple(slice(*r) for r in region)] = value

        def dtype(self, name: str) -> torch.dtype:
            return torch.float32

        def read(self, name: str, region: hf.Region) -> torch.Tensor:
            return self.tensors[name][tuple(slice(*r) for r in region)]

        def scale(self, name: str, region: hf.Region) -> None:
            return None

    path = FOLDER
    held = Held()
    stored = hf.Stored(path)
    stored.into(held)
    config, origin = stored.config, stored.origin
    model = k3.cards(hf.load(path))
    for name, tensor in held.tensors.items():
        half = tensor.shape[0] // 2
        assert tensor[:half].isnan().all()
        assert tensor.isnan().all() if name.endswith("o_norm.weight") else torch.equal(tensor[half:], model.tensor(name)[half:])
        tensor.copy_(model.tensor(name))
    hf.write_from(held, config, tmp_path / "again", Options(), origin=origin)
    assert bytes_of(tmp_path / "again") == bytes_of(path)


def test_contents_are_read_from_headers(tmp_path: Path) -> None:
    path = golden(tmp_path / "released", packed=True)
    said = hf.contents(path)
    model = hf.load(path)
    assert said.parameters == sum(p.numel() for p in model.parameters()) + 6 * 8  # router biases are no parameters of torch
    assert said.quantised == "mxfp4" and said.packed == 6 * 8 * 3 and not said.unpacked_experts
    assert said.nbytes == sum(len(b) for _, _, b in bytes_of(path).values()) == sum(said.shards.values())
    assert said.parts["expert"].dtypes == {"U8": 2 * 6 * 8 * 3} and said.parts["vision_tower"].tensors == 2
    assert hf.contents(FOLDER).quantised is None and hf.contents(FOLDER).unpacked_experts == 6 * 8 * 3


def test_precision_is_lost_on_request_alone(tmp_path: Path) -> None:
    path = golden(tmp_path / "released", packed=False)
    tensors = load_file(path / hf.SINGLE)
    norm = "language_model.model.norm.weight"
    save_file(tensors | {norm: tensors[norm].float() + 1e-4}, path / hf.SINGLE)
    with pytest.raises(hf.CheckpointError, match=f"stored wider than the embedding's bfloat16: {norm}"):
        hf.load(path)
    assert hf.load(path, dtype=torch.bfloat16).norm.weight.dtype == torch.bfloat16
    # a release that keeps a convolution in bfloat16 has it back so
    conv = "language_model.model.layers.0.self_attn.q_conv1d.weight"
    save_file(tensors | {conv: tensors[conv].bfloat16()}, path / hf.SINGLE)
    model = hf.load(path)
    assert model.layers["0"].attention.q_conv1d.weight.dtype == torch.float32
    hf.save(model, tmp_path / "again")
    assert load_file(tmp_path / "again" / hf.SINGLE)[conv].dtype == torch.bfloat16
