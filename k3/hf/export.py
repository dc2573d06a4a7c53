"""Writes a model from any source as a published folder, one tensor at a time."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3.cards import describe
from k3.config import Gate, K3Config
from k3.hf.format import DTYPES, NAMES, CheckpointError, Entry
from k3.hf.pieces import Piece, Released, Source, check_blocks, pieces
from k3.hf.stored import PACKED_FORMAT, Stored, quantization
from k3.hf.writer import Writer
from k3.hf_config import from_published, to_published
from k3.origin import Origin
from kernels.mx import BLOCK, RULES, pack_mxfp4, requantise
from parallel.cards import DType
from parallel.together import from_first
from parallel.world import World

log = logging.getLogger("k3.hf")
A_LOG_PADDED = {96: 128}  # a fresh export writes what the release writes; other head counts have no published padding
SHARD_BYTES = 5_000_000_000
QUANTISE = (None, "mxfp4")


@dataclass(frozen=True)
class Options:
    """See k3.hf.save."""

    mtp: bool = True
    shard_bytes: int = SHARD_BYTES
    quantise: str | None = None
    scale_rule: str = "rceil"
    passthrough: Path | Released | None = None


def export(source: Source, config: K3Config, path: Path, options: Options, origin: Origin | None, world: World | None) -> None:
    """Every rank of `world` calls it; rank 0 writes. What fails there is raised on every rank, and nothing is left behind."""
    if not options.mtp:
        config = replace(config, mtp_layers=0, draft=False)
    todo = list(pieces(describe(config).values()))
    job: _Job | None = None

    def begin() -> None:
        nonlocal job
        job = _Job(source, config, path, options, origin, todo)

    from_first(world, begin)
    try:
        # layer by layer: a rank that cannot write takes what the others are sending until all hear of it
        for _, group in groupby(todo, key=lambda piece: piece.card.name.split(".")[:2]):
            failure: Exception | None = None
            for piece in group:
                value = source.read(piece.card.name, piece.region)
                scale = source.scale(piece.card.name, piece.region) if options.quantise and piece.card.quantise else None
                if job is not None and failure is None:
                    try:
                        job.write(piece, value, scale)
                    except Exception as error:
                        failure = error
            from_first(world, _raises(failure))
        from_first(world, lambda: job.finish() if job else None)
    except BaseException:
        if job is not None:
            job.writer.abort()
        raise


def _raises(failure: Exception | None) -> Callable[[], None]:
    def act() -> None:
        if failure is not None:
            raise failure

    return act


class _Job:
    """What rank 0 does: plans every tensor, then turns pieces into published tensors as they come."""

    def __init__(
        self, source: Source, config: K3Config, path: Path, options: Options, origin: Origin | None, todo: Sequence[Piece]
    ):
        if options.quantise not in QUANTISE:
            raise CheckpointError(f"quantise={options.quantise!r}: give one of {', '.join(map(repr, QUANTISE))}")
        if options.scale_rule not in RULES:
            raise CheckpointError(f"scale_rule={options.scale_rule!r}: give one of {', '.join(RULES)}")
        self.options = options
        like = options.passthrough
        self.like: Released | None = Stored(like, torch.float32) if isinstance(like, Path) else like
        self.origin = origin or (self.like.origin if self.like else Origin())
        self.config, self.source = config, source
        self.width = source.dtype(next(p.card.name for p in todo if p.card.dtype is DType.MODEL)).itemsize
        if options.quantise:
            check_blocks({piece.card.name: piece.card for piece in todo}.values())
        plan = [entry for piece in todo for entry in self._entries(piece)]
        plan += self.like.passed_through if self.like else []
        text = _config_text(config, options.quantise, self.like)
        self.writer = Writer(path, plan, text, options.shard_bytes)

    def _packs(self, piece: Piece) -> bool:
        return self.options.quantise is not None and piece.card.quantise is not None

    def _entries(self, piece: Piece) -> Iterator[Entry]:
        if self._packs(piece):
            for name, shape in zip((piece.packed, piece.scale), piece.packed_shapes):
                yield Entry(name, NAMES[torch.uint8], shape)
        else:
            yield Entry(piece.name, NAMES[self._dtype(piece)], self._shape(piece))

    def _dtype(self, piece: Piece) -> torch.dtype:
        own = self.source.dtype(piece.card.name)
        if piece.name in self.origin.narrow and self.width < own.itemsize:  # not where the whole model is wide on purpose
            return DTYPES[self.origin.narrow[piece.name]]
        return own

    def _shape(self, piece: Piece) -> tuple[int, ...]:
        if not piece.is_a_log:
            return piece.shape
        (heads,) = piece.shape
        given = self.origin.a_log_shape
        if given is not None and torch.Size(given).numel() >= heads:  # of a folder with fewer heads it says nothing
            return given
        return (1, 1, heads, 1) if self.config.kda.gate is Gate.softplus else (A_LOG_PADDED.get(heads, heads),)

    def write(self, piece: Piece, value: Tensor | None, scale: Tensor | None) -> None:
        assert value is not None
        if self._packs(piece):
            for name, tensor in zip((piece.packed, piece.scale), self._pack(piece, value.view(piece.shape), scale)):
                self.writer.write(name, tensor)
            return
        if piece.is_a_log:
            padded = value.new_zeros(torch.Size(self._shape(piece)).numel())
            padded[: value.numel()] = value
            value = padded
        self.writer.write(piece.name, value.to(self._dtype(piece)).reshape(self._shape(piece)))

    def _pack(self, piece: Piece, value: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        if not torch.isfinite(value).all():
            raise CheckpointError(f"quantise=mxfp4: {piece.name} holds NaN or infinity")
        if scale is None and self.like is not None:
            scale = self.like.kept_scale(piece)
        kept = None if scale is None else scale.view(piece.packed_shapes[1])
        codes, scales = requantise(value, "mxfp4", kept, self.options.scale_rule)
        return pack_mxfp4(codes), scales

    def finish(self) -> None:
        for entry in self.like.passed_through if self.like else []:
            assert self.like is not None
            self.writer.write(entry.name, self.like.extra(entry.name))
        self.writer.finish()


def _config_text(config: K3Config, quantise: str | None, like: Released | None) -> str:
    """config.json: that of `like`, where it describes the same model; its other entries stay in any case."""
    ours = to_published(config)
    document: dict[str, Any] = ours
    if like is not None:
        released = json.loads(like.config_text)
        document = copy.deepcopy(released)
        if to_published(from_published(document)) != ours:
            if ("text_config" in document) != ("text_config" in ours):
                raise CheckpointError(f"passthrough={like.where}: Kimi K3 and Kimi Linear do not mix")
            document.get("text_config", document).update(ours.get("text_config", ours))
    if quantise is None:
        for of in (document, document.get("text_config", {})):
            of.pop("quantization_config", None)
    elif quantization(document) is None:
        document.get("text_config", document)["quantization_config"] = _quantization_config()
    if like is not None and document == released:
        return like.config_text
    return json.dumps(document, indent=1) + "\n"


def _quantization_config() -> dict[str, Any]:
    """As released, and with the latent projections in the list of what is not packed (spec 10.1)."""
    weights = {
        "num_bits": 4, "type": "float", "group_size": BLOCK, "strategy": "group", "symmetric": True, "dynamic": False,
        "scale_dtype": "torch.uint8", "observer": "minmax",
    }  # fmt: skip
    group = {"format": PACKED_FORMAT, "targets": ["Linear"], "weights": weights, "input_activations": None}
    apart = ("self_attn", "shared_experts", r"mlp\.(gate|up|gate_up|down)_proj", "lm_head", "vision_tower", "mm_projector")
    ignore = [f"re:.*{part}.*" for part in (*apart, r"routed_expert_(down|up)_proj", "eh_proj", "block_sparse_moe.gate$")]
    return {
        "quant_method": "compressed-tensors", "format": PACKED_FORMAT, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ignore,
    }  # fmt: skip
