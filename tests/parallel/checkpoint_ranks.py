"""What tests/parallel/test_checkpoint.py has each of two ranks do."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import parallel
from parallel import checkpoint
from parallel.checkpoint import CheckpointError
from parallel.config import ParallelConfig


class Bag:
    def __init__(self, **tensors: Tensor):
        self.tensors = tensors

    def state_dict(self) -> dict[str, Tensor]:
        return self.tensors

    def load_state_dict(self, state: Any) -> None:
        self.tensors = dict(state)


def save(folder: str, damage: str = "") -> dict[str, Any]:
    """Each rank saves ten times its number and loads it back: what it got, the facts, the refusals of what does not fit."""
    config = ParallelConfig(dp=2)
    world = parallel.start(config)
    mine = Bag(x=torch.full((300,), 10.0 * world.rank))
    failure = None
    if damage == "disk" and world.rank == 1:
        checkpoint._verify = lambda path, tensors: (_ for _ in ()).throw(CheckpointError(f"{path.name}: no such luck"))
    try:
        path = checkpoint.save(Path(folder), 3, {"bag": mine}, {"position": 3 + world.rank}, keep_last=1, world=world)
    except CheckpointError as error:
        return {"failure": str(error)}
    if damage == "file" and world.rank == 1:
        file = path / "rank_0001/bag.safetensors"
        content = bytearray(file.read_bytes())
        content[-9] ^= 1
        file.write_bytes(content)
    torch.distributed.barrier()
    other = Bag(x=torch.zeros(300))
    facts = None
    try:
        facts = checkpoint.load(path, {"bag": other}, world)
    except CheckpointError as error:
        failure = str(error)
    another = dataclasses.replace(world, config=dataclasses.replace(config, zero=0))
    refusal = None
    try:
        checkpoint.load(path, {"bag": Bag(x=torch.zeros(300))}, another)
    except CheckpointError as error:
        refusal = str(error)
    return {"got": other.tensors["x"][0].item(), "facts": facts, "failure": failure, "refusal": refusal}
