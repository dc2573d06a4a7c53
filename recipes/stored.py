"""Checkpoints of ours as files: which one a path means, what it holds, and its tensors one by one, whatever layout wrote it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from k3.cards import describe
from k3.config import K3Config
from k3.hf import Piece, Region
from k3.hf.format import NAMES, Entry
from k3.origin import Origin
from k3.qat import Qat, QatConfig, Rule
from kernels.mx import BLOCK
from parallel import checkpoint, checkpoint_index
from parallel.cards import DType
from parallel.checkpoint_folder import damages, unloadable
from parallel.checkpoint_tensors import Tensors
from recipes.errors import UserError, first_line

WEIGHTS = "model"  # the provider that recipes/callbacks/checkpoints.py stores them under
# what recipes/importing.py stores beside them: E8M0 codes by card name, and tensors that are no part of the model by their own
SCALES, EXTRAS = "scales", "extras"


def find(path: Path) -> Path | None:
    """The checkpoint that `path` is, or the last one of the run folder that it is; None: it is neither.

    Raises UserError for a run without a checkpoint.
    """
    if (path / "state.json").is_file():
        return path
    if not (path / "checkpoints").is_dir():
        return None
    last = checkpoint.latest(path / "checkpoints")
    if last is None:
        raise UserError(f"{path}: this run has no checkpoint yet")
    return last


class Stored:
    """A checkpoint as k3.hf's Source of a model's weights. Reading checks nothing that `check` has not."""

    def __init__(self, path: Path):
        self.path = path
        self.facts = checkpoint.facts(path)

    @cached_property
    def index(self) -> Any:
        return checkpoint_index.read(self.path, self.facts["files"])

    @cached_property
    def tensors(self) -> Tensors:
        return Tensors(self.path, self.index)

    @cached_property
    def config(self) -> K3Config:
        if "model" not in self.facts:
            raise UserError(f"{self.path}: its state.json does not say which model it is of")
        try:
            read = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(K3Config), self.facts["model"]))
        except Exception as error:  # OmegaConf's errors have no common base
            raise UserError(f"{self.path}: holds a model that this version cannot represent: {first_line(error)}") from error
        assert isinstance(read, K3Config)
        return read

    @property
    def qat(self) -> QatConfig:
        """That of the run; of an imported checkpoint, or one older than the setting, without quantisation."""
        read = self.facts.get("config", {}).get("qat")
        if not isinstance(read, dict):
            return QatConfig()
        try:
            return QatConfig(Qat[read["name"]], Rule[read["rule"]])
        except KeyError as error:
            raise UserError(f"{self.path}: was trained with a qat that this version does not know: {read}") from error

    def check(self, *, sums: bool = True) -> None:
        """Raises CheckpointError for missing and damaged files, and for weights that are not those of its model.

        sums=False: does not read the files to their ends.
        """
        wrong = list(damages(self.path, self.facts["files"], sums=sums)) or list(self._misfits())
        if wrong:
            raise checkpoint.CheckpointError(unloadable(self.path, wrong))

    def _misfits(self) -> Iterator[str]:
        kinds = {
            DType.FP32: (torch.float32, torch.float64),
            DType.MODEL: (torch.bfloat16, torch.float32, torch.float64),
        }
        for card in describe(self.config).values():
            name = f"{WEIGHTS}.{card.name}"
            if name not in self.tensors:
                yield f"{name}: missing in the checkpoint"
            elif self.tensors.shape(name) != card.shape or self.tensors.dtype(name) not in kinds[card.dtype]:
                yield f"{name}: {self.tensors.dtype(name)} {list(self.tensors.shape(name))}, and its model has {list(card.shape)}"

    @property
    def released(self) -> Released | None:
        """What the released folder had that this was imported from; None: it was trained here."""
        if "released" not in self.facts:
            return None
        known = {"config": str, "packed": bool, "narrow": dict, "extras": list}
        facts = self.facts["released"]
        if not isinstance(facts, dict) or not all(isinstance(facts.get(key), kind) for key, kind in known.items()):
            raise checkpoint.CheckpointError(f"{self.path}/state.json is damaged: it does not say what was released")
        return Released(self)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors.dtype(self._weight(name))

    def read(self, name: str, region: Region) -> Tensor:
        return self.tensors.read(self._weight(name), region)

    def scale(self, name: str, region: Region) -> Tensor | None:
        if (stored := f"{SCALES}.{name}") not in self.tensors:
            return None
        *lead, (first, last) = region
        return self.tensors.read(stored, (*lead, (first // BLOCK, last // BLOCK)))

    def _weight(self, name: str) -> str:
        if (stored := f"{WEIGHTS}.{name}") not in self.tensors:
            raise UserError(f"{self.path}: holds no {stored}, which its model has")
        return stored


class Released:
    """k3.hf's Released, as an imported checkpoint keeps it."""

    def __init__(self, stored: Stored):
        self._stored, self._facts = stored, stored.facts["released"]
        self.where = stored.path

    @property
    def origin(self) -> Origin:
        shape = self._facts["a_log_shape"]
        return Origin(a_log_shape=None if shape is None else tuple(shape), narrow=self._facts["narrow"])

    @property
    def is_packed(self) -> bool:
        return self._facts["packed"]

    @property
    def config_text(self) -> str:
        return self._facts["config"]

    @property
    def passed_through(self) -> Sequence[Entry]:
        tensors, out = self._stored.tensors, []
        for name in self._facts["extras"]:
            stored = f"{EXTRAS}.{name}"
            out.append(Entry(name, NAMES[tensors.dtype(stored)], tensors.shape(stored)))
        return out

    def extra(self, name: str) -> Tensor:
        return self._stored.tensors.read(f"{EXTRAS}.{name}")

    def kept_scale(self, piece: Piece) -> Tensor | None:
        if piece.card.quantise is None:
            return None
        scale = self._stored.scale(piece.card.name, piece.region)
        return None if scale is None else scale.view(piece.packed_shapes[1])
