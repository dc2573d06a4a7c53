"""`k3 import`: a published folder as a checkpoint of ours, by one process or several, no more than a tensor at a time in each."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch import Tensor

import parallel
from k3 import ConfigError, hf
from k3.hf import Region
from kernels.mx import BLOCK
from parallel.cards import Card
from parallel.checkpoint import CheckpointError
from parallel.checkpoint_stream import Stream
from parallel.config import ParallelConfig
from parallel.together import gather, told_once
from parallel.world import World
from recipes import processes
from recipes.console import console, say, show_logs
from recipes.errors import UserError
from recipes.stored import EXTRAS, SCALES, WEIGHTS
from recipes.words import given, one_of

USAGE = "published=FOLDER out=FOLDER [dtype=bf16|fp32|fp64] [processes=N]"
KEYS = ("published", "out", "dtype", "processes")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
MISTAKES = (UserError, CheckpointError, hf.CheckpointError, ConfigError)


def run(words: Sequence[str]) -> int:
    """Raises UserError for what was mistyped, k3.hf's and parallel.checkpoint's CheckpointError for what cannot be read or
    written; then nothing is left at `out`.
    """
    values = given("import", words, KEYS, needed=2, usage=USAGE)
    os.environ.update(processes.joined(os.environ))
    started, wanted = processes.count(os.environ), values.pop("processes", None)
    if wanted is not None:
        if not (wanted.isascii() and wanted.isdigit()) or int(wanted) < 1:
            raise UserError(f"processes={wanted}: give a number from 1 on")
        if started is not None:
            raise UserError(f"processes={wanted}: a launcher has started {started} already; leave it out")
        if int(wanted) > 1:
            return processes.run(["import", *(f"{key}={value}" for key, value in values.items())], int(wanted))
    dtype = one_of("dtype", values["dtype"], DTYPES) if "dtype" in values else None
    processes.follow(os.environ)
    show_logs()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # files are read and written: no device is needed
    world = parallel.start(ParallelConfig(dp=started or 1), "cpu")
    console.quiet = world.rank > 0
    try:
        with told_once(world, MISTAKES):
            take_in(Path(values["published"]), Path(values["out"]), world, dtype)
    finally:
        parallel.stop()
    return 0


def take_in(path: Path, out: Path, world: World, dtype: torch.dtype | None = None) -> None:
    """Writes the model in the published folder `path`, what else is in it, and the scales of packed weights, as the checkpoint
    `out`. Every rank of `world` calls it and takes its share; all see both folders.
    """
    stored = hf.Stored(path, dtype)
    stream = Stream(out, world)
    try:
        failure: Exception | None = None
        try:
            _Share(stored, stream, world).take()
        except Exception as error:  # told on every rank below
            failure = error
        for told in gather(world, failure):
            if told is not None:
                raise told
        origin = stored.origin
        released = {
            "path": str(path.resolve()),
            "config": stored.config_text,
            "packed": stored.is_packed,
            "a_log_shape": origin.a_log_shape,
            "narrow": dict(origin.narrow),
            "extras": [entry.name for entry in stored.passed_through],
        }
        model = OmegaConf.to_container(OmegaConf.structured(stored.config), enum_to_str=True)
        stream.finish({"model": model, "released": released})
    except BaseException:
        stream.abort()
        raise
    parameters = sum(prod(card.shape) for card in stored.cards.values())
    say(f"{out}: {parameters:,} parameters of {path}{', packed as mxfp4 there' if stored.is_packed else ''}; train from it with")
    say(f"    k3 pretrain run.init={out}")


class _Share:
    """k3.hf's Sink of what one of the ranks writes: of a stack of experts a share, of other parameters whole ones."""

    def __init__(self, stored: hf.Stored, stream: Stream, world: World):
        self.stored, self.stream, self.world = stored, stream, world
        self.owner = _owners(stored.cards, world.size)
        self.scaled = {piece.card.name for piece in stored.pieces if piece.packed in stored.folder.entries}

    def take(self) -> None:
        self.stored.into(self)
        if self.world.rank == 0:
            for entry in self.stored.passed_through:
                self.stream.write(f"{EXTRAS}.{entry.name}", self.stored.extra(entry.name))

    def region(self, name: str) -> Region | None:
        card, (rank, of) = self.stored.cards[name], (self.world.rank, self.world.size)
        whole = tuple((0, n) for n in card.shape)
        if not card.blocks.per_expert:
            return whole if self.owner[name] == rank else None
        first, last = (card.shape[0] * number // of for number in (rank, rank + 1))
        return ((first, last), *whole[1:]) if first < last else None

    def write(self, name: str, region: Region, value: Tensor, scale: Tensor | None) -> None:
        shape, offset = self.stored.cards[name].shape, [first for first, _ in region]
        self.stream.write(f"{WEIGHTS}.{name}", value.to(self.stored.dtype(name)), shape, offset)
        if name in self.scaled:
            if scale is None:  # a folder may pack some experts and others not; these are exact under no scale of 0
                scale = torch.zeros(*value.shape[:-1], value.shape[-1] // BLOCK, dtype=torch.uint8)
            blocks = (*shape[:-1], shape[-1] // BLOCK), (*offset[:-1], offset[-1] // BLOCK)
            self.stream.write(f"{SCALES}.{name}", scale, *blocks)


def _owners(cards: Mapping[str, Card], ranks: int) -> dict[str, int]:
    """Which rank writes each parameter that is not cut over them: the largest first, to the one with the least."""
    loads, out = [0] * ranks, {}
    whole = [card for card in cards.values() if not card.blocks.per_expert]
    for card in sorted(whole, key=lambda card: -prod(card.shape)):
        rank = loads.index(min(loads))
        out[card.name] = rank
        loads[rank] += prod(card.shape)
    return out
