"""`k3 status [FOLDER]`: the runs of a folder, how far each is, where it lives, and what to do about one that stopped.

Told from the run folders, and from Slurm's queue where there is one.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from recipes.compose import CONFIG_FILE
from recipes.errors import UserError, word
from recipes.submit import read_facts
from slurm import client
from slurm.client import Queued, SlurmError

TAIL = 2**20  # bytes of a file in which its last line is looked for
ALIVE = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT")
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")


@dataclass(frozen=True)
class Status:
    folder: Path
    state: str  # running, pending, requeued, done, failed, stopped or unknown
    why: str
    step: int
    steps: int
    loss: float | None
    speed: float | None  # tokens a second, of the last step
    where: str  # job and nodes, or process
    advice: tuple[str, ...]


def run(words: Sequence[str]) -> int:
    """Prints it. Raises UserError where the folder is not there."""
    if len(words) > 1 or any("=" in text for text in words):
        raise UserError(f"status {' '.join(words)}: give one folder of runs or one run folder, or none for runs")
    base = Path(words[0] if words else "runs")
    if not base.is_dir():
        raise UserError(f"{base}: no such folder; give one that holds runs, or start one with k3 pretrain")
    folders = [base] if (base / CONFIG_FILE).is_file() else sorted(file.parent for file in base.glob(f"*/{CONFIG_FILE}"))
    if not folders:
        print(f"{base}: no runs")
        return 0
    queue: Mapping[int, Queued] | None = None
    if client.available():
        try:
            queue = client.jobs()
        except SlurmError as error:
            print(f"Slurm's queue is not known: {error}")
    print("\n".join(line for text in [of(folder, queue) for folder in folders] for line in shown(text, width(folders))))
    return 0


def width(folders: Sequence[Path]) -> int:
    return max(len(str(folder)) for folder in folders)


def shown(s: Status, wide: int) -> list[str]:
    loss = f"loss {s.loss:.4f}" if s.loss is not None else ""
    speed = f"{s.speed:,.0f} tokens/s" if s.speed is not None else ""
    line = f"{s.folder!s:<{wide}}  {s.state:<8}  step {f'{s.step}/{s.steps}':<11}  {loss:<12}  {speed:>18}  {s.where}"
    return [line.rstrip() + (f": {s.why}" if s.why else ""), *(f"    {text}" for text in s.advice)]


def of(folder: Path, queue: Mapping[int, Queued] | None) -> Status:
    """queue: Slurm's jobs by number; None: there is no Slurm here, or it does not answer."""
    facts = read_facts(folder)
    steps = OmegaConf.load(folder / CONFIG_FILE).run.steps
    last = last_record(folder / "metrics.jsonl")
    number = facts.get("job")
    job = (queue or {}).get(number) if number is not None else None
    process = holder(folder)
    state, why = judge(folder, number, job, queue is not None, process, started=bool(last))
    nodes = f" on {job.nodes}" if job and job.nodes else f", {facts['nodes']} nodes" if facts else ""
    where = f"job {number}{nodes}" if number is not None else f"process {process}" if process else "no process"
    step = last.get("step", 0)
    advice = _advice(folder, state, facts) if state in ("failed", "stopped", "unknown") else ()
    return Status(folder, state, why, step, steps, last.get("loss"), last.get("tokens_per_second"), where, advice)


def judge(
    folder: Path, number: int | None, job: Queued | None, asked: bool, process: int | None, *, started: bool
) -> tuple[str, str]:
    """(state, why). number: of the folder's job; job: what the queue says; asked: whether there is one; started: has trained."""
    if (folder / "summary.json").is_file():
        return "done", ""
    if process:
        return "running", ""
    if job and job.state in ALIVE:
        return "running", "" if job.state == "RUNNING" else job.state.lower()
    if job and job.state in WAITING:
        return "requeued" if started else "pending", job.reason if job.reason != "None" else ""
    if job and job.state not in ("COMPLETED", "CANCELLED"):
        return "failed", job.state.lower()
    if number is not None and (code := exit_code(folder, number)) is not None:
        return "failed", f"exit code {code}"
    if job and job.state == "CANCELLED":
        return "stopped", "cancelled"
    if number is not None and not asked:
        return "unknown", "there is no Slurm here to ask"
    return "stopped", ""


def exit_code(folder: Path, number: int) -> int | None:
    """What the job's script has written when it failed."""
    with contextlib.suppress(OSError, ValueError):
        job, code = (folder / "job.exit").read_text().split()
        return int(code) if int(job) == number else None
    return None


def holder(folder: Path) -> int | None:
    """The process of this machine that trains in the folder: one that has its lock open, whose number it holds."""
    with contextlib.suppress(OSError, ValueError):
        lock = (folder / ".lock").resolve()
        number = int(lock.read_text())
        files = [os.readlink(link.path) for link in os.scandir(f"/proc/{number}/fd")]
        return number if str(lock) in files else None
    return None


def last_record(file: Path) -> dict[str, Any]:
    """The last whole line of a metrics file, empty where there is none; a long file is not read from its beginning."""
    whole = [line for line in tail(file).splitlines(keepends=True) if line.endswith("\n")]
    with contextlib.suppress(ValueError, IndexError):
        return json.loads(whole[-1])
    return {}


def tail(file: Path) -> str:
    with contextlib.suppress(OSError), file.open("rb") as opened:
        opened.seek(max(0, opened.seek(0, os.SEEK_END) - TAIL))
        return opened.read().decode(errors="replace")
    return ""


def _advice(folder: Path, state: str, facts: Mapping[str, Any]) -> tuple[str, ...]:
    lines = []
    if log := facts.get("log"):
        said = [line.rsplit("\r", 1)[-1].strip() for line in tail(Path(log)).splitlines()]
        said = [line for line in said if line and not line.startswith("srun:")]
        lines.append(f"its log ends: {said[-1]}   ({log})" if said else f"log: {log}, which says nothing yet")
    if state != "unknown":
        there = (folder / "checkpoints" / "latest").is_file()
        here = word("run.resume", str(folder)) if there else f"{word('run.dir', str(folder))} run.resume=auto"
        lines.append(f"continue with: {facts.get('resume') or f'k3 pretrain {here}'}")
    return tuple(lines)
