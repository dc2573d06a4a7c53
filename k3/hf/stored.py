"""The parameters of the model in a published folder: checked by name, dtype and shape, then read region by region."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3.cards import describe, published_prefix
from k3.hf.folder import Folder
from k3.hf.format import DTYPES, CheckpointError, Entry, some
from k3.hf.pieces import Piece, Region, Sink, overlap, pieces
from k3.hf_config import from_published
from k3.origin import Origin
from kernels.mx import BLOCK, dequantise, unpack_mxfp4
from parallel.cards import Card, DType, Quantise

log = logging.getLogger("k3.hf")
NOT_OURS = ("vision_tower.", "mm_projector.")  # of a released checkpoint: no part of the language model
PACKED_FORMAT = "mxfp4-pack-quantized"
DTYPES_OF_MODELS = (torch.bfloat16, torch.float32, torch.float64)  # float16 cannot hold what MXFP4 can
FLOATS = ("F64", "F32", "BF16", "F16")


class Stored:
    """A Source. `config` is config.json's, with no MTP layers where the folder has none.

    Values are exactly the stored ones, packed weights dequantised to `dtype` (None: that of the embedding). Raises
    CheckpointError with every missing, extra, misshapen or mistyped tensor, and ConfigError for a config.json this stack cannot
    represent.
    """

    def __init__(self, path: Path, dtype: torch.dtype | None = None):
        self.folder = Folder(path)
        self.config = config = from_published(self.folder.config)
        check_quantization(path, self.folder.config)
        prefix = published_prefix(config)
        if config.mtp_layers and not any(name.startswith(f"{prefix}mtp.") for name in self.folder.entries):
            config.mtp_layers, config.draft = 0, False  # an export may leave the MTP layers out
        self.cards = describe(config)
        self.pieces = list(pieces(self.cards.values()))
        _check(self.folder, self.pieces, prefix)
        self.stored_dtype = DTYPES[self.folder.entries[f"{prefix}model.embed_tokens.weight"].dtype]
        self._dtype = dtype or self.stored_dtype
        if self._dtype not in DTYPES_OF_MODELS:
            raise CheckpointError(
                f"{path}: {'stored in ' if dtype is None else 'dtype='}{self._dtype}: load it with dtype= one of "
                f"{', '.join(map(str, DTYPES_OF_MODELS))}"
            )
        if dtype is None:
            self._refuse_narrowing()
        self._by_region = {(p.card.name, p.region): p for p in self.pieces}

    @property
    def origin(self) -> Origin:
        """Without scales: those are read with the weights."""
        entries = self.folder.entries
        shapes = [entries[p.name].shape for p in self.pieces if p.is_a_log]
        kept = {p.name: entries[p.name].dtype for p in self.pieces if p.card.dtype is DType.FP32}
        narrow = {name: dtype for name, dtype in kept.items() if DTYPES[dtype].itemsize < torch.float32.itemsize}
        return Origin(a_log_shape=shapes[0] if shapes else None, narrow=narrow)

    @property
    def passed_through(self) -> list[Entry]:
        """The tensors that are no part of the language model, in the order in which they are stored."""
        return [entry for entry in self.folder.entries.values() if entry.name.startswith(NOT_OURS)]

    @property
    def where(self) -> Path:
        return self.folder.path

    @property
    def config_text(self) -> str:
        return self.folder.config_text

    @property
    def is_packed(self) -> bool:
        """Whether any weight is stored as MXFP4."""
        return any(piece.packed in self.folder.entries for piece in self.pieces)

    def extra(self, name: str) -> Tensor:
        return self.folder.read(name)

    def kept_scale(self, piece: Piece) -> Tensor | None:
        there = self.folder.entries.get(piece.scale)
        return self.folder.read(piece.scale) if there is not None and there.shape == piece.packed_shapes[1] else None

    def dtype(self, name: str) -> torch.dtype:
        return self.cards[name].dtype.resolve(self._dtype)

    def read(self, name: str, region: Region) -> Tensor:
        """A region that `pieces` names."""
        return self.part(self._by_region[name, region], region)[0].to(self.dtype(name))

    def scale(self, name: str, region: Region) -> Tensor | None:
        piece = self._by_region[name, region]
        if piece.scale not in self.folder.entries:
            return None
        return self.folder.read(piece.scale).view(*(b - a for a, b in region[:-1]), -1)

    def part(self, piece: Piece, region: Region) -> tuple[Tensor, Tensor | None]:
        """A part of a piece as [*region], in the stored precision, and its scales if it is packed; only that part is read.

        Raises CheckpointError for packed weights that hold no finite value, or padding that holds anything.
        """
        shape = tuple(last - first for first, last in region)
        index = piece.stored_index(region)
        if piece.is_a_log:
            heads, value = piece.card.shape[0], self.folder.read(piece.name).flatten()
            if value[heads:].any():
                raise CheckpointError(f"{self.folder.path}: {piece.name} has {heads} heads; what pads it is not zero")
            return value[index[0][0] : index[0][1]], None
        if piece.packed not in self.folder.entries:
            return self.folder.read(piece.name, index).view(shape), None
        *lead, (first, last) = index
        packed = self.folder.read(piece.packed, (*lead, (first // 2, last // 2)))
        scale = self.folder.read(piece.scale, (*lead, (first // BLOCK, last // BLOCK)))
        value = dequantise(unpack_mxfp4(packed), scale, "mxfp4", self._dtype)
        if not torch.isfinite(value).all():
            raise CheckpointError(f"{self.folder.path}: {piece.packed} with {piece.scale} holds NaN or infinity")
        return value.view(shape), scale.view(*shape[:-1], -1)

    def into(self, sink: Sink) -> None:
        """Gives the sink every region that it holds, reading nothing else."""
        for card, its in _by_card(self.pieces):
            if (held := sink.region(card.name)) is None:
                continue
            for piece in its:
                if (region := overlap(piece.region, held)) is not None:
                    value, scale = self.part(piece, region)
                    sink.write(card.name, region, value, scale)

    def say(self) -> None:
        """Names in the log what is left out, and what is stored in less precision than a release keeps."""
        if ignored := self.passed_through:
            tops = sorted({entry.name.split(".")[0] for entry in ignored})
            size = sum(entry.nbytes for entry in ignored) / 1e9
            log.info(f"{self.folder.path}: {len(ignored)} tensors of {', '.join(tops)} ({size:.3g} GB) are no part of this model")
        if narrow := self.origin.narrow:
            log.info(f"{self.folder.path}: not in float32, as Kimi K3's release keeps them: {some(narrow)}")

    def _refuse_narrowing(self) -> None:
        width = self._dtype.itemsize
        floats = [p for p in self.pieces if p.card.dtype is DType.MODEL and p.name in self.folder.entries]
        wide = [p.name for p in floats if DTYPES[self.folder.entries[p.name].dtype].itemsize > width]
        if wide:
            raise CheckpointError(
                f"{self.folder.path}: stored wider than the embedding's {str(self._dtype).removeprefix('torch.')}: {some(wide)}; "
                "name the dtype to load: the widest keeps all, a narrower one rounds"
            )


def _by_card(of: Sequence[Piece]) -> Iterable[tuple[Card, list[Piece]]]:
    grouped: dict[str, list[Piece]] = {}
    for piece in of:
        grouped.setdefault(piece.card.name, []).append(piece)
    return [(its[0].card, its) for its in grouped.values()]


def check_quantization(path: Path, document: Mapping[str, Any]) -> None:
    """Raises CheckpointError where config.json describes packed weights of another kind than MXFP4.

    Which tensors are packed is seen from the tensors: the released list of what is not packed lacks the latent projections.
    """
    given = quantization(document)
    if given is None:
        return
    groups = given.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    weights = [g.get("weights") or {} for g in groups if isinstance(g, dict)]
    formats = {given.get("format"), *(g.get("format") for g in groups if isinstance(g, dict))} - {None}
    kinds = {(w.get("num_bits"), w.get("group_size")) for w in weights}
    if formats != {PACKED_FORMAT} or kinds - {(4, BLOCK)}:
        said = f"format {sorted(map(str, formats))}, (bits, group) {sorted(map(str, kinds))}"
        raise CheckpointError(f"{path}: quantization_config: {said}; only {PACKED_FORMAT} of 4 bits in groups of {BLOCK} is read")


def quantization(document: Mapping[str, Any]) -> dict[str, Any] | None:
    """The quantization_config of a config.json, wherever it stands."""
    text = document.get("text_config")
    for given in (document.get("quantization_config"), text.get("quantization_config") if isinstance(text, dict) else None):
        if given is not None and not isinstance(given, dict):
            raise CheckpointError(f"config.json: quantization_config is {given!r}; an object is expected")
    found = document.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    return found if isinstance(found, dict) else None


def _check(folder: Folder, of: Sequence[Piece], prefix: str) -> None:
    entries = folder.entries
    names, absent, misshapen, mistyped = set[str](), list[str](), list[str](), list[str]()

    def expect(name: str, shape: tuple[int, ...], dtypes: Sequence[str], fits: bool | None = None) -> None:
        names.add(name)
        if name not in entries:
            absent.append(name)
            return
        got = entries[name]
        if not (got.shape == shape if fits is None else fits):
            misshapen.append(f"{name} is {list(got.shape)}, config.json says {list(shape)}")
        if got.dtype not in dtypes:
            mistyped.append(f"{name} is {got.dtype}, expected {' or '.join(dtypes)}")

    for piece in of:
        if piece.card.quantise is Quantise.MXFP4 and (piece.packed in entries or piece.scale in entries):
            for name, shape in zip((piece.packed, piece.scale), piece.packed_shapes):
                expect(name, shape, ["U8"])
        elif piece.is_a_log and piece.name in entries:
            got = entries[piece.name].shape
            padded = math.prod(got) == piece.shape[0] or (len(got) == 1 and got[0] >= piece.shape[0])
            expect(piece.name, piece.shape, FLOATS, padded)
        else:
            expect(piece.name, piece.shape, FLOATS)
    problems = []
    extra = sorted(name for name in set(entries) - names if not name.startswith(NOT_OURS))
    if absent and extra and len(absent) == len(names):
        what = "Kimi K3's (language_model.*)" if prefix else "Kimi Linear's (model.*)"
        problems.append(f"config.json is {what}, and tensors are named otherwise, as {extra[0]}: two checkpoints are mixed up")
    else:
        problems += [f"missing: {some(absent)}"] if absent else []
        problems += [f"not part of this model: {some(extra)}"] if extra else []
    problems += [f"misshapen: {some(misshapen)}"] if misshapen else []
    problems += [f"dtypes: {some(mistyped)}"] if mistyped else []
    if len({entries[p.name].shape for p in of if p.is_a_log and p.name in entries}) > 1:
        problems.append("A_log has different lengths in different layers")
    if problems:
        raise CheckpointError(f"{folder.path}: " + "; ".join(problems))
