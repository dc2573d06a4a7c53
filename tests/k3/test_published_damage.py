"""What a damaged or dishonest folder says: one line with the file, what is wrong and, where there is one, the fix."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from k3 import hf
from k3.hf.folder import Folder
from k3.hf.format import Entry
from k3.hf.writer import Writer
from tests.k3.published import golden, write

NORM = "language_model.model.norm.weight"
SCALE = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_scale"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    hf.convert(golden(tmp_path / "released", packed=True), tmp_path / "m", quantise="mxfp4", shard_bytes=200_000)
    return tmp_path / "m"


def first(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def edit_index(folder: Path, change: Callable[[dict], None]) -> None:
    document = json.loads((folder / hf.INDEX).read_text())
    change(document)
    (folder / hf.INDEX).write_text(json.dumps(document))


def rename(folder: Path, to: str) -> None:
    edit_index(folder, lambda d: d["weight_map"].update({n: to for n, f in d["weight_map"].items() if f == first(folder).name}))


def truncate(folder: Path, by: int) -> None:
    os.truncate(first(folder), first(folder).stat().st_size - by)


def link_out(folder: Path) -> None:
    file = first(folder)
    os.rename(file, folder.parent / "elsewhere")
    file.symlink_to(folder.parent / "elsewhere")


def overwrite(folder: Path, data: bytes) -> None:
    first(folder).write_bytes(data)


def lie(folder: Path) -> None:
    """The header gives a tensor one dtype more than it has bytes for."""
    data = first(folder).read_bytes()
    first(folder).write_bytes(data.replace(b'"BF16"', b'"F32" ', 1))


def bad_config(folder: Path, **entries: object) -> None:
    document = json.loads((folder / "config.json").read_text())
    document["text_config"]["quantization_config"] |= entries
    (folder / "config.json").write_text(json.dumps(document))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), r"no config\.json; give the folder"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), r"config\.json: not JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), r"holds a list; a JSON object is expected"),
    "index is no JSON": (lambda f: (f / hf.INDEX).write_text("?"), r"index\.json: not JSON"),
    "index without a map": (lambda f: (f / hf.INDEX).write_text("{}"), "no weight_map"),
    "index climbs": (lambda f: rename(f, "../released/m.safetensors"), r"not names of safetensors files beside it: '\.\."),
    "index is absolute": (lambda f: rename(f, "/etc/x.safetensors"), r"not names of safetensors files beside it: '/etc"),
    "index names a pickle": (lambda f: rename(f, "pytorch_model.bin"), r"not names of safetensors files beside it: 'pytorch_m"),
    "missing shard": (lambda f: first(f).unlink(), r"names files that are not there: model-00001-of"),
    "wrong shard": (lambda f: rename(f, sorted(f.glob("*.safetensors"))[1].name), "their files do not hold: .* more"),
    "index lists too much": (
        lambda f: edit_index(f, lambda d: d["weight_map"].update(ghost=first(f).name)), "their files do not hold: ghost",
    ),
    "index lists too little": (lambda f: edit_index(f, lambda d: d["weight_map"].pop(NORM)), f"holds {NORM}, which .* nowhere"),
    "truncated data": (lambda f: truncate(f, 7), r"truncated: \d+ bytes, its header describes \d+; copy the file again"),
    "longer": (lambda f: first(f).open("ab").write(b"x"), "longer than its tensors"),
    "truncated header": (lambda f: os.truncate(first(f), 200), "not a readable safetensors file, or truncated"),
    "empty": (lambda f: overwrite(f, b""), r"not a readable safetensors file \(no header\)"),
    "a pickle": (lambda f: overwrite(f, pickle.dumps({"a": 1}) * 9), "not a readable safetensors file"),
    "header is no object": (lambda f: overwrite(f, b"\x02" + bytes(7) + b"[]"), "not a readable safetensors file"),
    "header lies": (lie, r"is \d+ bytes, the header gives it"),
    "a link out": (link_out, r"a link to .*elsewhere, outside the folder; put the file itself there"),
    "other packing": (lambda f: bad_config(f, format="nvfp4-pack-quantized"), "only mxfp4-pack-quantized of 4 bits in groups of"),
    "other groups": (
        lambda f: bad_config(f, config_groups={"g": {"weights": {"num_bits": 4, "group_size": 16}}}), r"\(4, 16\).*of 32 is read",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_one_clear_line(name: str, sharded: Path) -> None:
    damage, says = DAMAGES[name]
    damage(sharded)
    with pytest.raises(hf.CheckpointError, match=says) as caught:
        hf.load(sharded)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700
    with pytest.raises(hf.CheckpointError, match=says):
        hf.contents(sharded)


def test_links_inside_the_folder_and_a_linked_folder_are_read(sharded: Path, tmp_path: Path) -> None:
    file = first(sharded)
    os.rename(file, sharded / "blob")
    file.symlink_to("blob")
    (tmp_path / "link").symlink_to(sharded)
    hf.load(tmp_path / "link")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({NORM: torch.ones(64, dtype=torch.int64)}, f"dtypes: {NORM} is I64, expected F64 or F32 or BF16 or F16"),
        ({SCALE: torch.ones(64, 1)}, f"dtypes: {SCALE} is F32, expected U8"),
        ({SCALE: torch.ones(64, 2, dtype=torch.uint8)}, rf"misshapen: {SCALE} is \[64, 2\], config.json says \[64, 1\]"),
        ({SCALE: torch.full((64, 1), 255, dtype=torch.uint8)}, r"experts\.0\.w1.* holds NaN or infinity"),
        ({SCALE: None}, f"missing: {SCALE}"),
        ({"language_model.model.layers.0.self_attn.A_log": torch.ones(9)}, "A_log has different lengths"),
    ],
)  # fmt: skip
def test_wrong_tensors_are_named(change: dict[str, torch.Tensor | None], says: str, tmp_path: Path) -> None:
    path = golden(tmp_path / "m", packed=True)
    tensors = load_file(path / hf.SINGLE) | change
    save_file({n: t for n, t in tensors.items() if t is not None}, path / hf.SINGLE)
    with pytest.raises(hf.CheckpointError, match=says):
        hf.load(path)


def test_padding_that_holds_something_is_refused(tmp_path: Path) -> None:
    path = golden(tmp_path / "m", packed=False)
    tensors = load_file(path / hf.SINGLE)
    for name in [n for n in tensors if n.endswith("A_log")]:
        tensors[name] = torch.cat([tensors[name], torch.ones(2)])
    save_file(tensors, path / hf.SINGLE)
    with pytest.raises(hf.CheckpointError, match="has 4 heads; what pads it is not zero"):
        hf.load(path)


def test_options_that_cannot_be_honoured(tmp_path: Path) -> None:
    path = golden(tmp_path / "m", packed=False)
    model = hf.load(path)
    wrong = {"quantise": "mxfp8", "scale_rule": "up", "shard_bytes": 0, "passthrough": tmp_path / "nowhere"}
    for name, value in wrong.items():
        with pytest.raises(hf.CheckpointError, match=r"mxfp8|'up'|shard_bytes=0|nowhere: no config"):
            hf.save(model, tmp_path / "out", **{name: value})
    with pytest.raises(hf.CheckpointError, match=r"dtype=torch\.float16: load it with dtype= one of torch\.bfloat16"):
        hf.load(path, dtype=torch.float16)
    assert [f.name for f in tmp_path.iterdir()] == ["m"], "nothing half-made is left"


def test_the_writer_leaves_nothing_unfinished(tmp_path: Path) -> None:
    plan = [Entry("a", "F32", (2, 3)), Entry("b", "BF16", (5,)), Entry("c", "U8", ())]
    writer = Writer(tmp_path / "m", plan, "{}", 10)
    writer.write("b", torch.ones(5, dtype=torch.bfloat16))
    with pytest.raises(hf.CheckpointError, match=r"a: planned as F32 \[2, 3\]; given torch.float64"):
        writer.write("a", torch.ones(2, 3, dtype=torch.float64))
    with pytest.raises(hf.CheckpointError, match="b: not planned, or written already"):
        writer.write("b", torch.ones(5, dtype=torch.bfloat16))
    with pytest.raises(hf.CheckpointError, match=r"not written: .*c"):
        writer.finish()
    assert not list(tmp_path.iterdir())


def test_reading_a_part_gives_that_part(tmp_path: Path) -> None:
    tensors = {
        "m": torch.randn(5, 7, 3).bfloat16(),
        "s": torch.tensor(3.5),
        "e": torch.empty(0, 4),
        "u": torch.arange(6, dtype=torch.uint8),
    }
    folder = Folder(write(tmp_path / "m", tensors, {}))
    for name, value in tensors.items():
        assert torch.equal(folder.read(name), value) and folder.read(name).dtype == value.dtype
    assert torch.equal(folder.read("m", ((1, 4), (2, 7), (1, 2))), tensors["m"][1:4, 2:7, 1:2])
    assert torch.equal(folder.read("u", ((2, 5),)), tensors["u"][2:5])
