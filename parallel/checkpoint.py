"""Checkpoints that are either whole or not there: a folder of safetensors files with a `state.json`, and a `latest` file.

`save` takes named state providers (model, optimizer, random state ...) and knows nothing about what they are. Everything is
written to a temporary folder, flushed to the disk, read back, renamed, and only then does `latest` move. Nothing is ever
unpickled.

Of several processes each writes its own files, into `rank_0003/` of the one folder, which all of them must see; rank 0 does the
rest. Such a checkpoint is read back by the same layout alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from parallel.config import ParallelConfig
from parallel.together import from_first, gather
from parallel.world import World

FORMAT = 1
STATE = "state.json"
LATEST = "latest"


class CheckpointError(ValueError):
    """A checkpoint that is absent, damaged, or does not fit what it is loaded into; the message lists the names."""


class StateProvider(Protocol):
    """What a checkpoint stores under one name: flat tensors out, the same tensors in."""

    def state_dict(self) -> Mapping[str, Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Tensor], /) -> Any: ...


def save(
    folder: Path,
    step: int,
    providers: Mapping[str, StateProvider],
    facts: Mapping[str, Any],
    *,
    keep_last: int = 0,
    world: World | None = None,
) -> Path:
    """Writes `folder/step_<step>` and points `folder/latest` at it. Returns its path. Every rank of `world` must call it.

    `facts` (rank 0's) is what else a resume needs, as JSON (data position, run id, ...). `keep_last` > 0 removes all but that
    many of the newest checkpoints afterwards. A checkpoint of this very step to which `latest` already points is left as it is.
    Raises CheckpointError, on every rank, where what was read back on one differs from what was written.
    """
    target = folder / f"step_{step}"
    work = from_first(world, lambda: _begin(folder, target))
    if work is None:
        return target
    files = _everyones(world, lambda: _write_tensors(work, _prefix(world), providers))
    state = {**facts, **_layout(world), "format": FORMAT, "step": step, "files": files}
    from_first(world, lambda: _publish(work, target, state, keep_last))
    return target


def _begin(folder: Path, target: Path) -> Path | None:
    """The folder to write into, or None where the checkpoint is there already."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / LATEST).exists() and latest(folder) == target:
        return None
    for stale in folder.glob(".step_*"):  # of a process that was killed while it wrote
        shutil.rmtree(stale, ignore_errors=True)
    work = folder / f".{target.name}.{os.getpid()}"
    work.mkdir()
    return work


def _write_tensors(work: Path, prefix: str, providers: Mapping[str, StateProvider]) -> dict[str, Any]:
    """Writes this rank's files; what state.json says of each."""
    mode = work.stat().st_mode & 0o666  # safetensors makes files that only their owner reads
    (work / prefix).mkdir(exist_ok=True)
    files = {}
    for name, provider in providers.items():
        path = work / f"{prefix}{name}.safetensors"
        tensors = {key: _own(value) for key, value in provider.state_dict().items()}
        save_file(tensors, path)
        path.chmod(mode)
        _flush(path)
        _verify(path, tensors)
        files[prefix + name] = {"sha256": _digest(path), "tensors": len(tensors), "bytes": path.stat().st_size}
    if prefix:
        _flush(work / prefix)
    return files


def _everyones(world: World | None, write: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The files of all ranks; where one could not write, all raise CheckpointError."""
    if world is None or world.size == 1:
        return write()
    files: dict[str, Any] = {}
    failure = None
    try:
        files = write()
    except (CheckpointError, OSError, SafetensorError) as error:
        failure = f"rank {world.rank}: {error}"
    answers = gather(world, (files, failure))
    if failures := [failure for _, failure in answers if failure]:
        raise CheckpointError("\n".join(failures))
    return {name: entry for files, _ in answers for name, entry in files.items()}


def _publish(work: Path, target: Path, state: Mapping[str, Any], keep_last: int) -> None:
    folder = target.parent
    _write(work / STATE, json.dumps(state, indent=1) + "\n")
    _flush(work)
    if target.exists():  # finished by a process that died before it moved `latest`
        shutil.rmtree(target)
    os.rename(work, target)
    _flush(folder)
    _write(folder / (LATEST + ".new"), target.name + "\n")
    os.replace(folder / (LATEST + ".new"), folder / LATEST)
    _flush(folder)
    if keep_last > 0:
        for old in checkpoints(folder)[:-keep_last]:
            if old != target:
                (old / STATE).unlink(missing_ok=True)  # first, so that a half-removed folder is not taken for a checkpoint
                shutil.rmtree(old)


def _prefix(world: World | None) -> str:
    """Of this rank's files: none where a single process writes."""
    return "" if world is None or world.size == 1 else f"rank_{world.rank:04}/"


def _layout(world: World | None) -> dict[str, Any]:
    """The fact that says which layout wrote a checkpoint: none for a single process, whatever its options."""
    if world is None or world.size == 1:
        return {}
    full = dataclasses.replace(world.config, dp=world.data_size, sp=world.sequence_parallel)
    return {"layout": dataclasses.asdict(full)}


def checkpoints(folder: Path) -> list[Path]:
    """The finished checkpoints in a folder, oldest step first."""
    found = [p for p in folder.glob("step_*") if re.fullmatch(r"step_\d+", p.name) and (p / STATE).is_file()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step_")))


def latest(folder: Path) -> Path | None:
    """The checkpoint to which `folder/latest` points; without that file the newest finished one, or None.

    A checkpoint takes its name only when it is whole, so a missing pointer (a kill just before it moved, a copy that left it
    out) loses nothing. Raises CheckpointError where it names something that is not a finished checkpoint.
    """
    pointer = folder / LATEST
    if not pointer.is_file():
        finished = checkpoints(folder)
        return finished[-1] if finished else None
    path = folder / pointer.read_text().strip()
    if not (path / STATE).is_file():
        there = ", ".join(p.name for p in checkpoints(folder)) or "none"
        raise CheckpointError(f"{pointer} names {path.name}, which is no finished checkpoint; finished ones: {there}")
    return path


def facts(path: Path) -> dict[str, Any]:
    """What `state.json` of a checkpoint says. Raises CheckpointError for another format or an unreadable file."""
    try:
        state = json.loads((path / STATE).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path / STATE} cannot be read: {error}") from error
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{path} has checkpoint format {state.get('format')}; this version reads format {FORMAT}")
    return state


def load(path: Path, providers: Mapping[str, StateProvider], world: World | None = None) -> dict[str, Any]:
    """Loads every provider from a checkpoint and returns its facts. Every rank of `world` must call it.

    Raises CheckpointError, on every rank and before anything is loaded, where another layout wrote it, a file is damaged or the
    names, shapes or dtypes differ from what the providers hold; the message lists what differs.
    """
    state, loaded, wrong = _read(path, providers, world)
    answers = gather(world, wrong)
    if any(answers):
        if world is not None and world.size > 1:
            wrong = [f"rank {rank}: {line}" for rank, lines in enumerate(answers) for line in lines]
        more = f"\n  ... and {len(wrong) - 20} more" if len(wrong) > 20 else ""
        others = [p.name for p in checkpoints(path.parent) if p != path]
        hint = (
            f"\nto go on from an earlier one ({', '.join(others)}), write its name into {path.parent / LATEST}" if others else ""
        )
        raise CheckpointError(f"{path} cannot be loaded:\n  " + "\n  ".join(wrong[:20]) + more + hint)
    for name, provider in providers.items():
        provider.load_state_dict(loaded[name])
    return state


def _read(
    path: Path, providers: Mapping[str, StateProvider], world: World | None
) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]], list[str]]:
    """(facts, the tensors of each provider, what is wrong with them)."""
    state = from_first(world, lambda: facts(path))
    _check_layout(path, state.get("layout", {}), _layout(world).get("layout", {}))
    prefix = _prefix(world)
    stored = {name.removeprefix(prefix): entry for name, entry in state["files"].items() if name.startswith(prefix)}
    wrong = [f"{name}: stored, but nothing here takes it" for name in stored if name not in providers]
    wrong += [f"{name}: not stored" for name in providers if name not in stored]
    loaded = {}
    for name, provider in providers.items():
        if name not in stored:
            continue
        file = path / f"{prefix}{name}.safetensors"
        if not file.is_file() or _digest(file) != stored[name]["sha256"]:
            wrong.append(f"{file.name}: {'damaged (its sha256 differs)' if file.is_file() else 'missing'}")
            continue
        loaded[name] = load_file(file)
        wrong += [f"{name}: {line}" for line in _differences(loaded[name], provider.state_dict())]
    return state, loaded, wrong


def _check_layout(path: Path, stored: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    if stored == here:
        return
    single = dataclasses.asdict(ParallelConfig(dp=1, sp=False))
    then, now = stored or single, here or single
    differing = [
        f"parallel.{key}: {json.dumps(then.get(key))} there, {json.dumps(value)} here"
        for key, value in now.items()
        if then.get(key) != value
    ]
    raise CheckpointError(
        f"{path} was written by another parallel layout ({', '.join(differing)}); a checkpoint cannot be cut anew for another "
        "layout yet: continue with the one that wrote it"
    )


def _differences(stored: Mapping[str, Tensor], here: Mapping[str, Tensor]) -> list[str]:
    lines = [f"{key}: missing in the checkpoint" for key in here if key not in stored]
    lines += [f"{key}: only in the checkpoint" for key in stored if key not in here]
    for key in here:
        if key in stored and (stored[key].shape != here[key].shape or stored[key].dtype != here[key].dtype):
            then, now = stored[key], here[key]
            lines.append(f"{key}: stored {_kind(then)}, here {_kind(now)}")
    return lines


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _own(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous, and alone in its storage: what safetensors accepts."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor


def _verify(path: Path, tensors: Mapping[str, Tensor]) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            # NaN differs from itself, so bytes are compared, not values
            same = set(file.keys()) == set(tensors) and all(
                torch.equal(file.get_tensor(key).reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))
                for key, value in tensors.items()
            )
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read back: {error}") from error
    if not same:
        raise CheckpointError(f"{path} differs from what was written: check the disk, and its free space")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    _flush(path)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
