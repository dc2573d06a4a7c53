"""`k3 submit cluster=... nodes=...`: a run, or a chain of them, as jobs of Slurm.

What a run is, is decided here and written into its folder; its job starts `k3 pretrain` from that file, as often as Slurm starts
the job, and never composes anything again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.chain import Stage, stages
from recipes.compose import CONFIG_FILE
from recipes.config import SUBMITTING, Config, WandbMode
from recipes.errors import UserError, nearest, shown, word
from slurm import client
from slurm.client import SlurmError
from slurm.script import Job, render

if TYPE_CHECKING:
    from recipes.run_folder import RunFolder

SCRIPT = "job.sbatch"  # in the run folder
FACTS = "job.json"  # beside it: the number of the job, its log, and the words to submit it again


def run(words: Sequence[str]) -> int:
    """Submits it and prints each job's number, log and W&B run; with `submit.dry_run=true` prints the scripts instead.

    Raises UserError for what cannot run, before anything is queued; what a chain has queued by then is cancelled.
    """
    from recipes.cli import VERBS

    links = stages(words, [name for name, verb in VERBS.items() if verb.phase])
    if links[0].cfg.submit.dry_run:
        for link in links:
            print(render(job(link), link.cfg.cluster), end="")
        return 0
    if not client.available():
        raise UserError(
            "submit: Slurm's sbatch and squeue are not on the PATH; go to a login node of the cluster, or give "
            "submit.dry_run=true to see the script"
        )
    for link in links:
        check_cluster(link.cfg)
    queued: list[tuple[int, RunFolder]] = []
    try:
        for link in links:
            queued.append(submit(link, queued[-1][0] if queued else None))
    except BaseException:
        for number, folder in queued:
            with contextlib.suppress(SlurmError):
                client.cancel(number)
            clear(folder)
        raise
    return 0


def job(link: Stage, after: int | None = None, again: Sequence[str] = ()) -> Job:
    """again: words beside those of the folder's configuration, where it is continued with others."""
    cfg, directory = link.cfg, Path.cwd()
    assert cfg.run.dir is not None, "compose fills run.dir"
    folder = directory / cfg.run.dir
    logs = directory / cfg.cluster.log_dir if cfg.cluster.log_dir else folder
    name = cfg.submit.name or folder.name
    return Job(
        name=name,
        nodes=cfg.nodes,
        run=str(folder),
        log=str(logs / (f"{folder.name}-%j.log" if cfg.cluster.log_dir else "job-%j.log")),
        directory=str(directory),
        python=sys.executable,
        words=(link.phase, word("run.dir", str(folder)), "run.resume=auto", *again),
        resume=resume_command(cfg.run.dir, link.words, cfg),
        after=after,
        exclude=tuple(cfg.submit.exclude),
    )


def resume_command(folder: str, words: Sequence[str], cfg: Config) -> str:
    """What a user types to put the run of `folder` into the queue again."""
    kept = [w for w in words if w.split("=")[0].split(".")[0] in ("cluster", "submit") and not w.startswith("submit.dry_run=")]
    # auto: it may be needed before there is a checkpoint
    return shlex.join(["k3", "submit", word("run.dir", folder), "run.resume=auto", f"nodes={cfg.nodes}", *kept])


def submit(link: Stage, after: int | None) -> tuple[int, RunFolder]:
    """Writes the run folder and queues its job. Raises UserError, and leaves nothing in a new folder."""
    from recipes.run_folder import open_run  # with torch

    cfg = link.cfg
    assert cfg.run.dir is not None
    continued = (Path(cfg.run.dir) / CONFIG_FILE).is_file()
    opened = open_run(cfg)  # refuses a folder with another run, and one in which a process trains
    opened.close()  # before the job starts, which wants to hold it
    if opened.is_complete:
        raise UserError(f"run.dir={cfg.run.dir}: this run is complete; give another folder to begin a new one")
    if waiting := waits(opened.path):
        raise UserError(f"run.dir={cfg.run.dir}: job {waiting} is queued for it; cancel that (scancel {waiting}), or wait")
    script = opened.path / SCRIPT
    try:
        this = job(link, after, _again(link.words) if continued else ())
        log = Path(this.log).parent
        writable(log, cfg)
        script.write_text(render(this, cfg.cluster))
        number = queue(script, cfg)
    except BaseException:
        if not continued:
            clear(opened)
        raise
    path = this.log.replace("%j", str(number))
    said: dict[str, Any] = {"job": number, "phase": link.phase, "nodes": cfg.nodes, "log": path, "resume": this.resume}
    said |= {"after": after, "submitted": time.time()}
    (opened.path / FACTS).write_text(json.dumps(said, indent=1) + "\n")
    print(f"job {number}: {link.phase} in {cfg.run.dir}" + (f", after job {after}" if after is not None else ""))
    print(f"    log  {path}")
    if url := wandb_url(opened.path, cfg):
        print(f"    W&B  {url}")
    return number, opened


def clear(folder: RunFolder) -> None:
    """Removes what `submit` has written into a folder in which nothing has happened yet."""
    for name in (SCRIPT, FACTS):
        (folder.path / name).unlink(missing_ok=True)
    folder.discard()


def waits(folder: Path) -> int | None:
    """The job that is queued or runs for this folder, if there is one."""
    number = read_facts(folder).get("job")
    with contextlib.suppress(SlurmError):
        found = client.jobs().get(number) if number is not None else None
        return number if found and found.state in ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED") else None
    return None


def read_facts(folder: Path) -> dict[str, Any]:
    """What `submit` has written about the job of a run folder; empty where there is none."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((folder / FACTS).read_text())
    return {}


def check_cluster(cfg: Config) -> None:
    """Raises UserError for a partition that is not there, and for more nodes than it has."""
    try:
        there = client.partitions()
    except SlurmError as error:
        raise UserError(f"submit: the cluster's controller does not answer ({error})") from error
    partition, names = cfg.cluster.partition, [name for name in there if name]
    if partition is not None and partition not in there:
        near = f"; the nearest is {found}" if (found := nearest(partition, names)) else ""
        raise UserError(f"cluster.partition={partition}: the cluster has no such partition{near}; there are {', '.join(names)}")
    if partition is None and "" not in there:
        raise UserError(f"cluster.partition: the cluster has no default one; give one of {', '.join(names)}")
    most = there[partition or ""]
    if cfg.nodes > most:
        where = f"cluster.partition={partition}" if partition else "the default partition"
        raise UserError(f"nodes={cfg.nodes}: {where} has {most}; give nodes={most} or fewer, and parallel sizes to match")


def writable(folder: Path, cfg: Config) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        key = f"cluster.log_dir={cfg.cluster.log_dir}" if cfg.cluster.log_dir else f"run.dir={cfg.run.dir}"
        raise UserError(
            f"{key}: logs cannot be written there ({error.strerror}), and a job without a log ends unseen; give another folder"
        ) from error


def queue(script: Path, cfg: Config) -> int:
    try:
        return client.submit(script)
    except SlurmError as error:
        text = str(error)
        likely = {  # a part of Slurm's sentence -> the keys it is about
            "account": ("account",),
            "partition": ("partition",),
            "QOS": ("qos",),
            "qos": ("qos",),
            "time limit": ("time",),
            "feature": ("constraint",),
            "node": ("gpus_per_node", "tasks_per_node", "cpus_per_task", "memory"),
        }
        part = next((part for part in likely if part in text), None)
        words = [f"cluster.{key}={shown(getattr(cfg.cluster, key))}" for key in likely.get(part or "", ())]
        key = " ".join([*([f"nodes={cfg.nodes}"] if part == "node" else []), *words]) or "submit"
        raise UserError(f"{key}: sbatch refuses the job: {text}") from error


def wandb_url(folder: Path, cfg: Config) -> str | None:
    """Where the run will be seen; None where that is not known before it has begun."""
    entity = os.environ.get("WANDB_ENTITY")
    if cfg.wandb.mode in (WandbMode.disabled, WandbMode.offline) or not entity:
        return None
    from recipes.callbacks.wandb import run_id  # takes seconds
    from recipes.dashboard import base_url, wanted_mode

    if wanted_mode(cfg.wandb.mode) is not WandbMode.online:
        return None
    return f"{base_url().rstrip('/')}/{entity}/{cfg.wandb.project}/runs/{run_id(folder)}"


def _again(words: Sequence[str]) -> list[str]:
    """The words of a continued run that are the training's."""
    return [w for w in words if w.split("=")[0].split(".")[0] not in SUBMITTING and not w.startswith(("run.dir=", "run.resume="))]
