"""Published folders for tests, written by the safetensors library, and what ranks do with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import k3
import parallel
from k3 import hf
from k3.hf.folder import Folder
from parallel.config import ParallelConfig
from tests.golden.vectors import FOLDER

KEPT = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")  # float32 in the release
EXPERT = ".block_sparse_moe.experts."


def golden(folder: Path, *, packed: bool) -> Path:
    """The golden checkpoint as one is released: bfloat16 (float32 where kept), experts maybe packed, with vision tensors."""
    draw = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for name, value in load_file(FOLDER / "model.safetensors").items():
        if packed and EXPERT in name:
            tensors[f"{name}_packed"], tensors[f"{name}_scale"] = awkward(*value.shape, draw)
        else:
            tensors[name] = value if name.endswith(KEPT) else value.bfloat16()
    tensors["vision_tower.blocks.0.wqkv.weight"] = torch.randn(6, 4, generator=draw).bfloat16()
    tensors["mm_projector.linear.weight"] = torch.randn(3, 5, generator=draw)
    tensors["vision_tower.position"] = torch.arange(3)
    document = json.loads((FOLDER / "config.json").read_text())
    document |= {"vision_config": {"patch_size": 14}, "media_placeholder_token_id": 163605}
    if packed:
        group = {"format": "mxfp4-pack-quantized", "weights": {"num_bits": 4, "group_size": 32}, "targets": ["Linear"]}
        document["text_config"]["quantization_config"] = {"config_groups": {"group_0": group}, "ignore": ["re:.*self_attn.*"]}
    return write(folder, tensors, document)


def awkward(rows: int, columns: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Packed weights whose values fit under several scales: small elements, zeros of both signs, zero blocks with a scale."""
    codes = torch.randint(0, 16, (rows, columns // 32, 32), generator=draw, dtype=torch.uint8)
    most = torch.randint(0, 8, (rows, columns // 32, 1), generator=draw, dtype=torch.uint8)  # of the block's magnitudes
    codes = (codes & 8) | torch.minimum(codes & 7, most)
    codes = codes.view(rows, columns)
    scales = torch.randint(105, 130, (rows, columns // 32), generator=draw, dtype=torch.uint8)
    scales[0, 0], scales[-1, -1] = 0, 250
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scales


def write(folder: Path, tensors: dict[str, Tensor], document: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / hf.SINGLE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(document))
    return folder


def bytes_of(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor as the library reads it: its dtype, shape and bytes."""
    out = {}
    for file in sorted(folder.glob("model*.safetensors")):
        for name, value in load_file(file).items():
            out[name] = (str(value.dtype), tuple(value.shape), value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return out


def through(sizes: dict[str, Any], path: str, other: str, options: dict[str, Any]) -> dict[str, float]:
    """On ranks: loads `path` under a layout and saves it as `other`; {parameter: its sum on this rank}."""
    world = parallel.start(ParallelConfig(**sizes), "cpu")
    model = hf.load(path, world=world)
    hf.save(model, other, **options)
    return {name: p.detach().double().sum().item() for name, p in model.named_parameters()}


def refused(sizes: dict[str, Any], path: str, other: str) -> str:
    """On ranks: what saving over a folder that exists says, and saving what cannot be packed."""
    world = parallel.start(ParallelConfig(**sizes), "cpu")
    model = hf.load(path, world=world)
    said = []
    try:
        hf.save(model, path)
    except hf.CheckpointError as error:
        said.append(str(error))
    with torch.no_grad():  # on each rank its last expert: the first rank's fails, while the second has its own still to send
        for name, p in model.named_parameters():
            if name == "layers.2.feed_forward.experts.down":
                p[-1, 0, 0] = torch.nan
    try:
        hf.save(model, other, quantise="mxfp4")
    except hf.CheckpointError as error:
        said.append(str(error))
    return "\n".join(said)


def reading(sizes: dict[str, Any], path: str) -> tuple[int, int]:
    """On ranks: (bytes read from the folder, bytes of the parameters and router biases that this rank holds)."""
    world = parallel.start(ParallelConfig(**sizes), "cpu")
    read, seen = Folder.read, list[int]()

    def counted(*args: Any) -> Tensor:
        value = read(*args)
        seen.append(value.nbytes)
        return value

    Folder.read = counted  # type: ignore[method-assign]
    try:
        table = k3.cards(hf.load(path, world=world))
    finally:
        Folder.read = read  # type: ignore[method-assign]
    return sum(seen), sum(table.tensor(name).nbytes for name in table)
