"""Where a run stands, by what is on the disk and in what it says."""

from __future__ import annotations

import os
import re
from pathlib import Path

from parallel import checkpoint
from parallel.checkpoint_folder import GONE, LATEST, STATE, step_of
from recipes.faults.plan import STEPS, Kill, Moment


def published(checkpoints: Path) -> int:
    """The step of the checkpoint that a restart must continue from; 0 where there is none."""
    last = checkpoint.latest(checkpoints)
    return step_of(last) if last else 0


def pointed(checkpoints: Path) -> int:
    """The step that `latest` names; 0 where it is not there yet."""
    pointer = checkpoints / LATEST
    return step_of(checkpoints / pointer.read_text().strip()) if pointer.is_file() else 0


def names(folder: Path) -> dict[str, int]:
    """What is in a folder, with its inode: a folder made anew under an old name has another."""
    try:
        return {entry.name: entry.inode() for entry in os.scandir(folder)}
    except FileNotFoundError:
        return {}


def new_work(checkpoints: Path, there: dict[str, int], saved: str = "step_") -> list[str]:
    """Work folders of checkpoints that were begun since `there` was taken."""
    now = names(checkpoints).items() - there.items()
    return [name for name, _ in now if name.startswith(f".{saved}") and not name.endswith(GONE)]


def states_written(checkpoints: Path, there: dict[str, int]) -> bool:
    """Whether a checkpoint of which all is written waits for its name, or has it."""
    return not (work := new_work(checkpoints, there)) or any((checkpoints / name / STATE).exists() for name in work)


def removing(checkpoints: Path, there: dict[str, int]) -> list[str]:
    """Old checkpoints that are being removed."""
    return [name for name in names(checkpoints).keys() - there.keys() if name.endswith(GONE)]


def renamed(path: Path, there: dict[str, int]) -> bool:
    try:
        return os.stat(path).st_ino != there.get(path.name)
    except FileNotFoundError:
        return False


def found(checkpoints: Path, log: Path, kill: Kill, there: dict[str, int]) -> Moment:
    """The moment at which a kill fell, by what it has left on the disk."""
    if removing(checkpoints, there):
        return Moment.removing
    if new_work(checkpoints, there):
        return Moment.writing
    if any(path.name not in there and step_of(path) > pointed(checkpoints) for path in checkpoint.checkpoints(checkpoints)):
        return Moment.renamed
    if not step(log):
        return Moment.starting
    if kill.moment in (Moment.writing, Moment.renamed, Moment.removing):  # too late
        return Moment.after
    return Moment.before if kill.moment is Moment.starting else kill.moment


def step(log: Path) -> int:
    """The last step that a start has finished, by what it says; 0 before its first."""
    said = re.findall(rf"^step (\d+)/{STEPS}:", log.read_text(), flags=re.M)
    return int(said[-1]) if said else 0
