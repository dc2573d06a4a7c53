"""The folder of one run: who may write to it, what a resume continues from, and its metrics file.

config.yaml       the resolved configuration; a resume runs from it
metrics.jsonl     one object a step
tokenizer.json    what its tokens mean; a run that begins with this one's weights reads it
checkpoints/      step_N/ and `latest`
wandb.json        the id of the W&B run that every resume continues
job.*             of `k3 submit`: the script, the number of the job, its log, and how it failed
summary.txt/.json, loss.png, experts.png, residuals.png, sample.txt     when the run is complete
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import IO, Any

from parallel import checkpoint
from parallel.config import ParallelConfig
from recipes.coming import TOKENIZER
from recipes.compose import CONFIG_FILE, leaves, load_resolved, save_resolved
from recipes.config import Config
from recipes.errors import UserError, shown

LAYOUT = {*(f"parallel.{item.name}" for item in fields(ParallelConfig)), "data.micro_batch_size"}
# What a resume may change. Everything else, `run.steps` included (the learning-rate schedule spans it), decides the numbers,
# and a run continues as if it had never stopped.
FREE = {
    *("run.dir", "run.resume", "run.eval_every", "run.sample_tokens", "run.sample_prompt"),
    *("run.threads", "run.device", "wandb.mode", "wandb.project", "wandb.name", "wandb.group", "wandb.tags", "wandb.stall"),
    *("checkpoint.every", "checkpoint.keep_last", "checkpoint.keep_every", "checkpoint.asynchronous", "data.cache"),
    # lets a run go on that the guard has stopped; else it would stop again at the same step
    *("optim.guard.enabled", "optim.guard.deviations", "optim.guard.grad_norm", "optim.guard.loss", "optim.guard.max_skipped"),
    # another layout reads the same global batches and computes the same numbers up to rounding
    *LAYOUT,
    # saves other tensors, computes the same numbers bit for bit
    *("activations.layer", "activations.attention", "activations.feed_forward", "activations.head"),
    "activations.head_chunk",  # rounds the head's gradient otherwise, as another layout does
}


class RunFolder:
    """A run folder that this process holds until `close`. `checkpoint` is what a resume continues from, else None.

    Of several ranks the first holds it for all: the others' have no `lock`, and neither write nor remove anything in it.
    """

    def __init__(self, path: Path, lock: IO[str] | None, last: Path | None, phase: str, layout: Sequence[str] = ()):
        self.path = path
        self.checkpoint = last
        self._phase = phase
        self._layout = layout  # the words by which it differs from the one that the run began with
        self._lock = lock

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def resume_command(self) -> str:
        path = str(self.path)
        plain = re.fullmatch(r"[\w./-]+", path)  # anything else Hydra wants in quotes, and the shell wants around those
        resume = f"run.resume={path}" if plain else shlex.quote(f'run.resume="{path}"')
        return " ".join([f"k3 {self._phase}", resume, *map(shlex.quote, self._layout)])

    @property
    def is_complete(self) -> bool:
        """Whether its last checkpoint is the one that the summary tells of: an earlier one may have been chosen to go on from."""
        if self.checkpoint is None or not (self.path / "summary.json").is_file():
            return False
        return json.loads((self.path / "summary.json").read_text()).get("steps") == checkpoint.facts(self.checkpoint)["step"]

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def discard(self) -> None:
        """Removes a folder in which nothing has happened yet: a refused run leaves none behind."""
        if self._lock is not None and self.checkpoint is None and not self.metrics.exists():
            for name in (CONFIG_FILE, TOKENIZER, ".lock"):
                (self.path / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # what the user had in it stays
                self.path.rmdir()


def open_run(cfg: Config) -> RunFolder:
    """The run folder of `cfg.run.dir`: a fresh one with its config.yaml, or the one that `cfg.run.resume` continues.

    Raises UserError where the folder holds a run and no resume was asked for, where what was asked contradicts the run that
    is there, where there is no checkpoint to continue, and where another process trains in it.
    """
    assert cfg.run.dir is not None, "compose fills run.dir"
    path = Path(cfg.run.dir)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run.dir={path}: cannot be made: {error.strerror}; give another folder") from error
    lock = _hold(path)
    try:
        return _open(path, cfg, lock)
    except BaseException:
        lock.close()
        raise


def check_run(cfg: Config) -> None:
    """Raises what `open_run` would raise, and leaves everything as it was: for the process that only starts the ranks."""
    assert cfg.run.dir is not None, "compose fills run.dir"
    fresh = not (Path(cfg.run.dir) / CONFIG_FILE).is_file()
    folder = open_run(cfg)
    if fresh:
        folder.discard()
    folder.close()


def _open(path: Path, cfg: Config, lock: IO[str]) -> RunFolder:
    last = checkpoint.latest(path / "checkpoints")
    if not (path / CONFIG_FILE).is_file():
        if last is not None or (path / "metrics.jsonl").exists():
            raise UserError(f"run.dir={path}: holds a run without its {CONFIG_FILE}; give another folder")
        save_resolved(cfg, path / CONFIG_FILE)
        return RunFolder(path, lock, None, cfg.phase)
    if cfg.run.resume is None:
        raise UserError(f"run.dir={path}: already holds a run; continue it with run.resume={path}, or give another folder")
    if last is None and cfg.run.resume != "auto":
        raise UserError(
            f"run.resume={path}: the run has no checkpoint yet, so there is nothing to continue; "
            f"begin it again with run.dir={path} run.resume=auto"
        )
    saved = dict(leaves(load_resolved(path / CONFIG_FILE)))
    differing = [(key, saved[key], value) for key, value in leaves(cfg) if value != saved[key]]
    changed = [(key, old, new) for key, old, new in differing if key not in FREE]
    if changed:
        lines = [f"{key}={shown(new)}: the run in {path} has {shown(old)}" for key, old, new in changed]
        raise UserError("\n".join(lines) + "\na resumed run continues as it began: leave this out, or start a new run")
    return RunFolder(path, lock, last, cfg.phase, [f"{key}={shown(new)}" for key, _, new in differing if key in LAYOUT])


def _hold(path: Path) -> IO[str]:
    """An exclusive lock on the folder. The file stays: removing it would let two processes hold two different files."""
    lock = (path / ".lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        raise UserError(
            f"run.dir={path}: process {lock.read().strip()} trains in it; wait for it, or give another folder"
        ) from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics file in order; a last line that was cut off by a kill is left out."""
    if not path.is_file():
        return
    with path.open() as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def cut_metrics(path: Path, step: int) -> int:
    """Removes what a metrics file says about steps after `step`, which will be trained again, and a line that was cut off.

    Returns how many records are left.
    """
    kept = [json.dumps(record) + "\n" for record in read_metrics(path) if record["step"] <= step]
    if path.is_file():
        partial = path.with_name(path.name + ".partial")
        partial.write_text("".join(kept))
        os.replace(partial, path)
    return len(kept)
