"""Checkpoints that are either whole or not there, saved and loaded under any parallel layout, through megatron-core's
dist_checkpointing (torch_dist): a folder `step_N` with a file of tensors a rank, their index, and a `state.json`.

A checkpoint stores named state providers (model, optimizer, random state ...) and knows nothing about what they are:

    class Provider:                                # parallel/boxes.py: StateProvider
        per_rank: bool                             # False: boxes of whole tensors, the same under every layout
        def boxes(self) -> Iterable[Box]           # this rank's part: name, tensor (a view), whole shape, offset, which copy
        def loaded(self, anew: int | None) -> None # after the tensors of its boxes were filled

    saver = Saver(folder, world, keep_last=2)      # parallel/checkpoint_save.py
    saver.save(step, providers, facts)             # on every rank; returns when everything is copied
    saver.poll()                                   # at every step: raises what went wrong in the background
    facts = load(path, providers, world)           # on every rank; fills the boxes in place

A tensor is stored as `provider.name`, uncut, in as many boxes as ranks write of it. `facts` is what else a resume needs, as JSON.

Nothing of a checkpoint is trusted: files are checked against the checksums in state.json, the index is read by
parallel/checkpoint_index.py, and tensors as bytes (parallel/checkpoint_tensors.py). There are no other objects in it:
megatron-core's own `save` adds one of pickled bytes (`common_state`), for which reason its parts are used here one by one.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parallel.boxes import Box, StateProvider, key
from parallel.checkpoint_folder import (
    CheckpointError,
    changes,
    checkpoints,
    damages,
    facts,
    latest,
    layout,
    unloadable,
)
from parallel.checkpoint_save import Saver
from parallel.together import from_first, gather
from parallel.world import World

__all__ = ["CheckpointError", "Saver", "StateProvider", "checkpoints", "facts", "latest", "load", "save"]

logger = logging.getLogger(__name__)


def save(
    folder: Path,
    step: int,
    providers: Mapping[str, StateProvider],
    facts: Mapping[str, Any],
    world: World,
    *,
    keep_last: int = 0,
    keep_every: int = 0,
) -> Path:
    """Writes `folder/step_<step>`, points `folder/latest` at it, and waits for that. See Saver."""
    saver = Saver(folder, world, keep_last=keep_last, keep_every=keep_every, asynchronous=False)
    return saver.save(step, providers, facts)


def load(path: Path, providers: Mapping[str, StateProvider], world: World) -> dict[str, Any]:
    """Fills every provider from a checkpoint of whatever layout and returns its facts. Every rank of `world` must call it.

    Raises CheckpointError, on every rank and before anything is filled, where a file is missing or damaged, the index is not to
    be trusted, or names, whole shapes or dtypes differ from what the providers hold; the message lists at most 20 of them.
    """
    state = from_first(world, lambda: facts(path))
    files = state["files"]
    mine = {name: files[name] for number, name in enumerate(sorted(files)) if number % world.size == world.rank}
    _agree(path, list(damages(path, mine)), world)

    from parallel import checkpoint_index

    index = from_first(world, lambda: checkpoint_index.read(path, files))
    moved = changes(state["layout"], layout(world))
    rank = 0 if moved else world.rank
    wanted: dict[str, list[Box]] = defaultdict(list)
    for name, provider in providers.items():
        for box in provider.boxes():
            if box.tensor.numel():  # nothing is stored of an empty one
                wanted[key(name, provider, box.name, rank)].append(box)
    wrong = _differences(index.state_dict_metadata, wanted)
    taken = {name for names in gather(world, list(wanted)) for name in names}
    own = tuple(f"{name}." for name, provider in providers.items() if provider.per_rank and moved)
    if world.rank == 0:
        left = [name for name in index.state_dict_metadata if name not in taken and not name.startswith(own)]
        wrong += [f"{name}: only in the checkpoint" for name in left]
    _agree(path, sorted(wrong), world)

    _agree(path, _filled(path, index, wanted), world)
    for provider in providers.values():
        provider.loaded(world.rank if provider.per_rank and moved else None)
    if moved and world.rank == 0:
        fresh = ", ".join(name for name, provider in providers.items() if provider.per_rank)
        drawn = f"; of each rank's own state that of rank 0 was taken to make new ones from: {fresh}" if fresh else ""
        logger.info("%s was written by another layout (%s)%s", path.name, ", ".join(moved), drawn)
    return state


def _agree(path: Path, wrong: Sequence[str], world: World) -> None:
    """Raises CheckpointError on all ranks for what is wrong on any."""
    lines = list(dict.fromkeys(line for lines in gather(world, list(wrong)) for line in lines))
    if lines:
        raise CheckpointError(unloadable(path, lines))


def _differences(stored: Mapping[str, Any], wanted: Mapping[str, Sequence[Box]]) -> list[str]:
    lines = []
    for name, boxes in wanted.items():
        if name not in stored:
            lines.append(f"{name}: missing in the checkpoint")
            continue
        there = _kind(stored[name].properties.dtype, stored[name].size)
        here = _kind(boxes[0].tensor.dtype, boxes[0].shape)
        if there != here:
            lines.append(f"{name}: stored {there}, here {here}")
    return lines


def _kind(dtype: Any, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _filled(path: Path, index: Any, wanted: Mapping[str, Sequence[Box]]) -> list[str]:
    """Reads the boxes; what could not be read."""
    from parallel.checkpoint_tensors import Tensors

    try:
        tensors = Tensors(path, index)
        for name, boxes in wanted.items():
            for box in boxes:
                region = [(at, at + size) for at, size in zip(box.offset, box.tensor.shape)]
                tensors.fill(box.tensor, name, region)
    except (OSError, CheckpointError) as error:  # a file was taken away after it was checked, or its checksum was forged, too
        return [f"{path.name}: {str(error).splitlines()[0]}"]
    return []
