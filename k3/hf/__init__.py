"""The published checkpoint layout (spec 10.1, 10.2): Kimi K3's and Kimi Linear's folders of safetensors.

    model = load(path, world=world)                    # under any layout: each rank reads its own slices
    save(model, path, quantise="mxfp4")                # under any layout: rank 0 writes, one tensor at a time
    convert(path, other, quantise="mxfp4")             # a folder into another, without a model
    contents(path)                                     # what is in a folder, from its headers

Who holds parameters in another way gives them as a `Source` to `write_from`, or takes them as a `Sink` from `Stored.into`.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from k3.config import K3Config
from k3.construct import build, unwrap
from k3.hf.contents import Contents, contents
from k3.hf.export import SHARD_BYTES, Options, export
from k3.hf.format import INDEX, SINGLE, CheckpointError
from k3.hf.live import Live
from k3.hf.pieces import Piece, Region, Released, Sink, Source
from k3.hf.stored import Stored
from k3.model import Model
from k3.origin import Origin
from k3.qat import Qat, QatConfig
from parallel.world import World

__all__ = [
    "INDEX", "SINGLE", "CheckpointError", "Contents", "Options", "Piece", "Region", "Released", "Sink", "Source", "Stored",
    "contents", "convert", "load", "save", "write_from",
]  # fmt: skip


def load(
    path: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    world: World | None = None,
    qat: QatConfig | None = None,
) -> Model:
    """The model in folder `path`, of which each rank of `world` reads its own part; all must see the folder.

    `dtype` None takes the embedding's; tensors that the release keeps in float32 are float32 under bfloat16. Packed weights are
    dequantised exactly, their scales kept beside them (`Model.origin`), so that a save can pack them to the same bytes. Vision
    tensors are named in the log and left. Raises CheckpointError for missing, extra, misshapen or mistyped tensors and damaged
    files, and ConfigError for a config.json that this stack cannot represent. `qat`: as k3.build.
    """
    stored = Stored(Path(path), dtype)
    model = build(stored.config, world, dtype=dtype or stored.stored_dtype, qat=qat, draw_values=False)
    model.origin = stored.origin
    if model.world.rank == 0:
        stored.say()
    stored.into(Live(model))
    return model


def save(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    mtp: bool = True,
    shard_bytes: int = SHARD_BYTES,
    quantise: str | None = None,
    scale_rule: str | None = None,
    passthrough: str | os.PathLike[str] | None = None,
) -> None:
    """Writes `model` to the new folder `path`; every rank of the model's world calls it, and rank 0 writes.

    mtp=False leaves the MTP layers out. Above `shard_bytes` the tensors are spread over numbered files with an index. The folder
    appears only when it is whole. Tensors keep their present precision; with quantise="mxfp4" routed experts are packed. A block
    of 32 values may fit under several scales, which the values cannot tell apart: one that is exact under the scale it came with
    keeps that scale (of the model, else of `passthrough`), and any other takes scale_rule's ("rceil" or "floor", kernels/mx;
    None: that of the model's `qat`). Of a model built with qat=mxfp4 the packed weights are those that it computes with.
    passthrough: the folder the model was imported from: its vision tensors and foreign entries of config.json go along.

    Raises CheckpointError, on every rank, where `path` exists already or cannot be written so, or scale_rule is not that of qat;
    nothing is then left there.
    """
    whole = unwrap(model)
    rule = whole.qat.rule.value
    if whole.qat.name is Qat.mxfp4 and scale_rule not in (None, rule):
        raise CheckpointError(f"scale_rule={scale_rule!r}: the model computes with weights of rule {rule!r}; give that, or None")
    options = Options(mtp, shard_bytes, quantise, scale_rule or rule, None if passthrough is None else Path(passthrough))
    export(Live(whole), whole.k3, Path(path), options, whole.origin, whole.world)


def convert(
    path: str | os.PathLike[str],
    other: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    mtp: bool = True,
    shard_bytes: int = SHARD_BYTES,
    quantise: str | None = None,
    scale_rule: str = "rceil",
) -> None:
    """A published folder as another one: packed or not, in other shards, in `dtype`. Arguments and errors of `load` and `save`.

    One process, no model: no more than a tensor is in memory. Vision tensors go along.
    """
    stored = Stored(Path(path), dtype)
    options = Options(mtp, shard_bytes, quantise, scale_rule, Path(path))
    export(stored, stored.config, Path(other), options, stored.origin, None)


def write_from(
    source: Source, config: K3Config, path: str | os.PathLike[str], options: Options, *, origin: Origin | None = None,
    world: World | None = None,
) -> None:  # fmt: skip
    """`save` of a model that another source holds, on every rank of `world`."""
    export(source, config, Path(path), options, origin, world)
