"""Checkpoints of ours as files: which one a path means, what it holds, and its tensors one by one, whatever layout wrote it."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from k3.config import K3Config
from k3.hf import Region
from parallel import checkpoint, checkpoint_index
from parallel.checkpoint_folder import damages, unloadable
from recipes.errors import UserError, first_line

WEIGHTS = "model"  # the provider that recipes/callbacks/checkpoints.py stores them under


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
        self._last: tuple[str, Tensor] | None = None

    @cached_property
    def index(self) -> Any:
        return checkpoint_index.read(self.path, self.facts["files"])

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

    def check(self) -> None:
        """Raises CheckpointError for missing and damaged files."""
        if wrong := list(damages(self.path, self.facts["files"])):
            raise checkpoint.CheckpointError(unloadable(self.path, wrong))

    def dtype(self, name: str) -> torch.dtype:
        return self._entry(name).properties.dtype

    def read(self, name: str, region: Region) -> Tensor:
        self._entry(name)
        if self._last is None or self._last[0] != name:  # the experts of a stack come one by one
            self._last = name, checkpoint_index.tensor(self.path, self.index, f"{WEIGHTS}.{name}")
        return self._last[1][tuple(slice(first, last) for first, last in region)]

    def scale(self, name: str, region: Region) -> Tensor | None:
        return None

    def _entry(self, name: str) -> Any:
        entry = self.index.state_dict_metadata.get(f"{WEIGHTS}.{name}")
        if entry is None:
            raise UserError(f"{self.path}: holds no {WEIGHTS}.{name}, which its model has")
        return entry
