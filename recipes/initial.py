"""`run.init`: the weights that a run begins with, from a checkpoint of ours, a run's last one, or a published folder."""

from __future__ import annotations

import copy
from pathlib import Path

import torch

import k3
from k3 import hf
from k3.cards import describe
from k3.config import K3Config
from k3.hf.live import Live
from k3.init import draw
from optim.optimizer import Optimizer
from parallel.checkpoint import CheckpointError
from parallel.checkpoint_folder import damages, unloadable
from parallel.together import from_first, gather
from parallel.world import World
from recipes.coming import agree
from recipes.errors import UserError
from recipes.stored import WEIGHTS, Stored, find


class Initial:
    """What `path` holds. Raises UserError where that is neither of the three, and as their readers do."""

    def __init__(self, path: Path):
        self.path = path
        found = find(path)
        if found is None and not (path / "config.json").is_file():
            raise UserError(f"run.init={path}: neither a checkpoint, nor a run folder, nor a published folder")
        self._source: Stored | hf.Stored = hf.Stored(path) if found is None else Stored(found)

    @property
    def model(self) -> K3Config:
        """Its model, with the defaults of what is no part of it."""
        return copy.deepcopy(self._source.config)  # what is typed of it shall not change what it is compared with

    def check(self, model: K3Config) -> None:
        """As `agree`."""
        agree(self.path, self._source.config, model)

    def verify(self, world: World) -> None:
        """Compares a checkpoint's files with their checksums, each rank its share. Raises CheckpointError, on all ranks."""
        if isinstance(self._source, hf.Stored):
            return  # safetensors have no checksums; headers and sizes were checked
        from_first(world, lambda: self._source.check(sums=False))  # type: ignore[union-attr]
        files = self._source.facts["files"]
        mine = {name: files[name] for number, name in enumerate(sorted(files)) if number % world.size == world.rank}
        path = self._source.path
        lines = [line for lines in gather(world, list(damages(path, mine))) for line in lines]
        if lines:
            raise CheckpointError(unloadable(path, lines))

    @torch.no_grad()
    def weights(self, model: k3.Model) -> None:
        """Sets this rank's parameters and router biases, reading no other's. A draft's matrix, where there is none, is as it
        begins: then the draft is the MTP layer.
        """
        live, table = Live(model), k3.cards(model)
        added = set(table) - set(describe(self._source.config))
        draw(table, seed=0, std=model.k3.init_std, world=model.world, only=added)
        if isinstance(self._source, hf.Stored):
            self._source.into(live)
            return
        for name in table:
            if name in added:
                continue
            region = live.region(name)
            assert region is not None
            table.tensor(name).copy_(self._source.read(name, region))

    @torch.no_grad()
    def masters(self, optimizer: Optimizer) -> None:
        """Sets the float32 masters of bf16 weights where the checkpoint knows more than bf16 does. Every rank must call it."""
        if isinstance(self._source, hf.Stored):
            return
        tensors, found = self._source.tensors, False
        for box in optimizer.boxes():
            name = box.name.removesuffix(".master")
            better = [key for key in (f"optimizer.{box.name}", f"{WEIGHTS}.{name}") if key in tensors]
            if name == box.name or not better or tensors.dtype(better[0]) == torch.bfloat16:
                continue
            region = [(first, first + size) for first, size in zip(box.offset, box.tensor.shape)]
            box.tensor.copy_(tensors.read(better[0], region))
            found = True
        if any(gather(optimizer.shards.world, found)):
            optimizer.loaded()


def initial(path: str | None, world: World) -> Initial | None:
    """What `run.init` names, opened on every rank and verified."""
    if path is None:
        return None
    from_first(world, lambda: Initial(Path(path)) and None)  # so that one rank says what is wrong
    opened = Initial(Path(path))
    opened.verify(world)
    return opened
