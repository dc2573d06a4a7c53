"""What a folder of checkpoints holds, and which of them is the last: `step_N/` with a `state.json` each, and `latest`.

A checkpoint takes its name only when it is whole; `latest` moves after that.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import xxhash

from parallel.world import World

FORMAT = 2
FORMATS = {1: "one safetensors file a rank, which only the layout that wrote it can read"}
STATE = "state.json"
LATEST = "latest"
METADATA = ".metadata"  # torch_dist's index: which box of which tensor lies where
GONE = ".gone"  # ends the name of a checkpoint that is being removed
CHUNK = 1 << 20  # bytes read at once: they stay in the processor's cache until their checksum is taken
MOST = 20  # names in a message


class Entry(TypedDict):
    """Of a file."""

    bytes: int
    xxh3: str


class CheckpointError(ValueError):
    """A checkpoint that is absent, damaged, cannot be written, or does not fit what it is loaded into; the message lists the
    names.
    """


def unfinished(path: Path) -> Path:
    """A new hidden folder beside `path`, in which it is made until it is whole; those of processes that are no more go."""
    for stale in path.parent.glob(f".{path.name}.incomplete-*"):
        number = stale.name.rpartition("-")[2]
        if not (number.isdecimal() and Path(f"/proc/{number}").exists()):
            shutil.rmtree(stale, ignore_errors=True)
    work = path.with_name(f".{path.name}.incomplete-{os.getpid()}")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    return work


def begin(folder: Path, target: Path, keep_last: int, keep_every: int) -> Path | None:
    """The folder to write into, or None where the checkpoint is there already."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(".step_*"):  # of a process that was killed while it wrote, or removed
            shutil.rmtree(stale, ignore_errors=True)
        if latest(folder) == target:
            point(folder, target)  # a kill may have come before the pointer, or before what follows it
            prune(folder, target, keep_last, keep_every)
            return None
        work = folder / f".{target.name}.{os.getpid()}"
        work.mkdir()
    except OSError as error:
        raise CheckpointError(unwritten(target, [str(error)])) from error
    return work


def publish(work: Path, target: Path, state: Mapping[str, Any], keep_last: int, keep_every: int) -> None:
    """Names the finished checkpoint, points `latest` at it, and removes those that are no longer to be kept."""
    folder = target.parent
    seal(work, state)
    if target.exists():  # finished by a process that died before it moved `latest`
        remove(target)
    os.rename(work, target)
    flush(folder)
    point(folder, target)
    prune(folder, target, keep_last, keep_every)


def point(folder: Path, target: Path) -> None:
    """Has `latest` name a checkpoint."""
    write(folder / (LATEST + ".new"), target.name + "\n")
    os.replace(folder / (LATEST + ".new"), folder / LATEST)
    flush(folder)


def prune(folder: Path, target: Path, keep_last: int, keep_every: int) -> None:
    """Removes all but the `keep_last` newest checkpoints (0: none), every `keep_every`-th step's and `target`."""
    if keep_last > 0:
        for old in checkpoints(folder)[:-keep_last]:
            if old != target and not (keep_every > 0 and step_of(old) % keep_every == 0):
                remove(old)


def remove(path: Path) -> None:
    """Takes a checkpoint's name from it first: half of one is not taken for a checkpoint, and `begin` finds it."""
    gone = path.with_name(f".{path.name}{GONE}")
    os.rename(path, gone)
    shutil.rmtree(gone)


def seal(work: Path, state: Mapping[str, Any]) -> None:
    """Makes a folder of files a checkpoint, by its state.json, and all of it durable."""
    write(work / STATE, json.dumps(state, indent=1) + "\n")
    flush(work)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def checkpoints(folder: Path) -> list[Path]:
    """The finished checkpoints in a folder, oldest step first."""
    found = [p for p in folder.glob("step_*") if re.fullmatch(r"step_\d+", p.name) and (p / STATE).is_file()]
    return sorted(found, key=step_of)


def latest(folder: Path) -> Path | None:
    """The checkpoint to which `folder/latest` points; without that file the newest finished one, or None.

    A checkpoint takes its name only when it is whole, so a missing pointer (a kill just before it moved, a copy that left it
    out) loses nothing. Raises CheckpointError where it names something that is not a finished checkpoint.
    """
    pointer = folder / LATEST
    if not pointer.is_file():
        finished = checkpoints(folder)
        return finished[-1] if finished else None
    path = folder / pointer.read_bytes().decode(errors="replace").strip()
    if path.parent != folder or not (path / STATE).is_file():
        there = ", ".join(p.name for p in checkpoints(folder)) or "none"
        raise CheckpointError(f"{pointer} names {path.name}, which is no finished checkpoint; finished ones: {there}")
    return path


def facts(path: Path) -> dict[str, Any]:
    """What `state.json` of a checkpoint says. Raises CheckpointError for another format or an unreadable file."""
    try:
        state = json.loads((path / STATE).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path / STATE} cannot be read: {error}{instead(path)}") from error
    found = state.get("format") if isinstance(state, dict) else None
    if found != FORMAT:
        known = f" ({FORMATS[found]})" if found in FORMATS else ""
        raise CheckpointError(f"{path} has checkpoint format {found!r}{known}; this version reads format {FORMAT}")
    files = state.get("files")
    if not isinstance(files, dict) or METADATA not in files or not isinstance(state.get("layout"), dict):
        raise CheckpointError(f"{path / STATE} does not list the checkpoint's files and layout{instead(path)}")
    entries = [isinstance(e, dict) and type(e.get("bytes")) is int and isinstance(e.get("xxh3"), str) for e in files.values()]
    if not all(entries) or type(state.get("step")) is not int:
        raise CheckpointError(f"{path / STATE} is damaged: its step, or what it says of a file, is not there{instead(path)}")
    return state


def layout(world: World) -> dict[str, Any]:
    """The parallel layout of this run, with what it leaves open filled in: the fact that says which one wrote a checkpoint."""
    return dataclasses.asdict(dataclasses.replace(world.config, dp=world.data_size, sp=world.sequence_parallel))


def changes(stored: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """How two layouts differ, one key an entry."""
    keys = {**here, **stored}
    return [
        f"parallel.{key} {json.dumps(stored.get(key))} -> {json.dumps(here.get(key))}"
        for key in keys
        if stored.get(key) != here.get(key)
    ]


def damages(path: Path, files: Mapping[str, Entry], *, sums: bool = True) -> Iterator[str]:
    """What is wrong with the given files of a checkpoint, by the sizes and, with `sums`, checksums that its state.json holds."""
    home = path.resolve()
    for name, entry in files.items():
        file = path / name
        if Path(name).name != name or name == "..":
            yield f"{name!r}: not a plain file name"
        elif not os.path.lexists(file):
            yield f"{name}: missing"
        elif file.resolve().parent != home or not file.is_file():
            yield f"{name}: not a file in the checkpoint's own folder, or a link that leads out of it"
        elif (size := file.stat().st_size) != entry["bytes"]:
            yield f"{name}: {'truncated' if size < entry['bytes'] else 'too long'} ({size:,} bytes of {entry['bytes']:,})"
        elif sums and checksum(file) != entry["xxh3"]:
            yield f"{name}: damaged (its checksum differs)"


def checksum(path: Path) -> str:
    """XXH3 of a file, as fast as memory: guards against disks and copies, not against people."""
    found, buffer = xxhash.xxh3_64(), memoryview(bytearray(CHUNK))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            found.update(buffer[:size])
    return found.hexdigest()


def entry(path: Path) -> Entry:
    """What state.json says of a file."""
    return {"bytes": path.stat().st_size, "xxh3": checksum(path)}


def listed(lines: Sequence[str]) -> str:
    """At most MOST lines, indented, and how many more there are."""
    more = f"\n  ... and {len(lines) - MOST} more" if len(lines) > MOST else ""
    return "\n  " + "\n  ".join(lines[:MOST]) + more


def unloadable(path: Path, lines: Sequence[str]) -> str:
    return f"{path} cannot be loaded:{listed(lines)}{instead(path)}"


def unwritten(target: Path, lines: Sequence[str]) -> str:
    last = latest(target.parent) if target.parent.is_dir() else None
    good = f"the last good checkpoint is {last}" if last else "there is no checkpoint yet"
    return f"{target} could not be written:{listed(lines)}\n{good}; mend the disk or the folder, and resume the run"


def instead(path: Path) -> str:
    """How to go on from another checkpoint of the same folder."""
    others = [p.name for p in checkpoints(path.parent) if p != path]
    return f"\nto go on from an earlier one ({', '.join(others)}), write its name into {path.parent / LATEST}" if others else ""


def write(path: Path, text: str) -> None:
    path.write_text(text)
    flush(path)


def flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
