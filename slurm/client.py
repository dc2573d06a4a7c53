"""Slurm's own commands: submit, cancel, look. Nothing here knows what a job does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PATIENCE = 60  # seconds for a command: a busy controller takes its time


class SlurmError(Exception):
    """What Slurm refused, in its own words."""


@dataclass(frozen=True)
class Queued:
    """A job as the controller knows it; also for a while after its end."""

    state: str  # RUNNING, PENDING, COMPLETED, FAILED, ...
    nodes: str
    reason: str  # why it waits


def available() -> bool:
    return shutil.which("sbatch") is not None and shutil.which("squeue") is not None


def submit(script: Path) -> int:
    """The number of the job that now waits to run `script`. Raises SlurmError."""
    env = clean(os.environ, script.read_text())
    said = _do(["sbatch", "--parsable", str(script)], env=env)
    return int(said.strip().split(";")[0])


def cancel(job: int) -> None:
    _do(["scancel", str(job)])


def partitions() -> dict[str, int]:
    """Partition -> its nodes, those that are down included; the default one is also there as ''."""
    found: dict[str, int] = {}
    for line in _do(["sinfo", "--noheader", "--format=%P %D", "--all"]).splitlines():
        name, count = line.split()
        for key in (name.rstrip("*"), *([""] if name.endswith("*") else [])):
            found[key] = found.get(key, 0) + int(count)
    return found


def jobs() -> dict[int, Queued]:
    """This user's jobs by their number, and those that ended a few minutes ago. Raises SlurmError where no controller answers."""
    found = {}
    for line in _do(["squeue", "--me", "--noheader", "--states=all", "--format=%i|%T|%N|%r"]).splitlines():
        number, state, nodes, reason = line.split("|", 3)
        if number.isdecimal():  # an array's tasks are none of ours
            found[int(number)] = Queued(state, nodes, reason)
    return found


def clean(env: Mapping[str, str], script: str) -> dict[str, str]:
    """`env` without what another job has left in it, and without defaults of sbatch that would win over the script's options."""
    said = {"SBATCH_" + name.upper().replace("-", "_") for name in re.findall(r"^#SBATCH --([\w-]+)", script, flags=re.M)}
    return {k: v for k, v in env.items() if k not in said and (k == "SLURM_CONF" or not k.startswith(("SLURM_", "SRUN_")))}


def _do(words: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    try:
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=PATIENCE)
    except FileNotFoundError as error:
        raise SlurmError(f"{words[0]}: not found on this machine") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"{words[0]}: no answer within {PATIENCE} s") from error
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line] or [f"exit code {done.returncode}"]
        raise SlurmError(re.sub(rf"^{words[0]}: (error: )?", "", lines[-1]))
    return done.stdout
