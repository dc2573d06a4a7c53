"""Checkpoints that are either whole or not there: a folder of safetensors files with a `state.json`, and a `latest` file.

`save` takes named state providers (model, optimizer, random state ...) and knows nothing about what they are. Everything is
written to a temporary folder, flushed to the disk, read back, renamed, and only then does `latest` move. Nothing is ever
unpickled. One process writes for now; a sharded form keeps this interface.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

FORMAT = 1
STATE = "state.json"
LATEST = "latest"


class CheckpointError(ValueError):
    """A checkpoint that is absent, damaged, or does not fit what it is loaded into; the message lists the names."""


class StateProvider(Protocol):
    """What a checkpoint stores under one name: flat tensors out, the same tensors in."""

    def state_dict(self) -> Mapping[str, Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Tensor], /) -> Any: ...


class ModuleState:
    """A module's parameters and persistent buffers. Loads in place, so that flat parameter buffers keep their views."""

    def __init__(self, module: nn.Module):
        self.module = module

    def state_dict(self) -> dict[str, Tensor]:
        # megatron-core's layers add non-tensor `_extra_state` entries, empty outside fp8
        return {name: value for name, value in self.module.state_dict().items() if isinstance(value, Tensor)}

    def load_state_dict(self, state: Mapping[str, Tensor], /) -> None:
        with torch.no_grad():
            for name, value in self.state_dict().items():
                value.copy_(state[name])


def seed_generators(seed: int) -> None:
    """Seeds every generator that `RandomState` holds, so that two fresh runs of one seed draw the same."""
    torch.manual_seed(seed)  # the GPU's too
    np.random.seed(seed)
    random.seed(seed)


class RandomState:
    """The generators of torch (CPU and this process's GPU), numpy and Python, as tensors."""

    def state_dict(self) -> dict[str, Tensor]:
        version, words, gauss = random.getstate()
        _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        state = {
            "torch": torch.get_rng_state(),
            "python": torch.tensor([version, *words], dtype=torch.int64),
            "python.gauss": torch.tensor([float("nan") if gauss is None else gauss], dtype=torch.float64),
            "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "numpy.position": torch.tensor([position, has_gauss], dtype=torch.int64),
            "numpy.gauss": torch.tensor([cached], dtype=torch.float64),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: Mapping[str, Tensor], /) -> None:
        torch.set_rng_state(state["torch"])
        version, *words = state["python"].tolist()
        gauss = state["python.gauss"].item()
        random.setstate((version, tuple(words), None if gauss != gauss else gauss))
        position, has_gauss = state["numpy.position"].tolist()
        keys = state["numpy"].numpy().astype(np.uint32)
        np.random.set_state(("MT19937", keys, position, has_gauss, state["numpy.gauss"].item()))
        if "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"])


def save(
    folder: Path, step: int, providers: Mapping[str, StateProvider], facts: Mapping[str, Any], *, keep_last: int = 0
) -> Path:
    """Writes `folder/step_<step>` and points `folder/latest` at it. Returns its path.

    `facts` is what else a resume needs, as JSON (data position, run id, ...). `keep_last` > 0 removes all but that many of
    the newest checkpoints afterwards. A checkpoint of this very step to which `latest` already points is left as it is.
    Raises CheckpointError where what was read back differs from what was written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"step_{step}"
    if (folder / LATEST).exists() and latest(folder) == target:
        return target
    for stale in folder.glob(".step_*"):  # of a process that was killed while it wrote
        shutil.rmtree(stale, ignore_errors=True)
    work = folder / f".step_{step}.{os.getpid()}"
    work.mkdir()
    files = {}
    for name, provider in providers.items():
        path = work / f"{name}.safetensors"
        tensors = {key: _own(value) for key, value in provider.state_dict().items()}
        save_file(tensors, path)
        path.chmod(work.stat().st_mode & 0o666)  # safetensors makes files that only their owner reads
        _flush(path)
        _verify(path, tensors)
        files[name] = {"sha256": _digest(path), "tensors": len(tensors), "bytes": path.stat().st_size}
    _write(work / STATE, json.dumps({**facts, "format": FORMAT, "step": step, "files": files}, indent=1) + "\n")
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
    return target


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


def load(path: Path, providers: Mapping[str, StateProvider]) -> dict[str, Any]:
    """Loads every provider from a checkpoint and returns its facts.

    Raises CheckpointError, before anything is loaded, where a file is damaged or the names, shapes or dtypes differ from
    what the providers hold; the message lists what differs.
    """
    state = facts(path)
    wrong = [f"{name}: stored, but nothing here takes it" for name in state["files"] if name not in providers]
    wrong += [f"{name}: not stored" for name in providers if name not in state["files"]]
    loaded = {}
    for name, provider in providers.items():
        if name not in state["files"]:
            continue
        file = path / f"{name}.safetensors"
        if not file.is_file() or _digest(file) != state["files"][name]["sha256"]:
            wrong.append(f"{file.name}: {'damaged (its sha256 differs)' if file.is_file() else 'missing'}")
            continue
        loaded[name] = load_file(file)
        wrong += [f"{name}: {line}" for line in _differences(loaded[name], provider.state_dict())]
    if wrong:
        more = f"\n  ... and {len(wrong) - 20} more" if len(wrong) > 20 else ""
        others = [p.name for p in checkpoints(path.parent) if p != path]
        hint = (
            f"\nto go on from an earlier one ({', '.join(others)}), write its name into {path.parent / LATEST}" if others else ""
        )
        raise CheckpointError(f"{path} cannot be loaded:\n  " + "\n  ".join(wrong[:20]) + more + hint)
    for name, provider in providers.items():
        provider.load_state_dict(loaded[name])
    return state


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
