"""One start of `k3 pretrain` in two processes, which can be killed.

Importing torch and megatron-core costs every process half a minute of a busy machine, a run of nine steps two seconds. So the
standard library's fork server imports them once and forks the ranks; each goes through the command's own entry with the
environment that recipes/processes.py gives a rank. A rank is a process like any other: nothing of its outlives a SIGKILL.
`Command` starts what a user types instead, with the process that watches over the ranks.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil

from parallel.local import ENVIRONMENT
from recipes import processes

RANKS = 2
PRELOADED = "recipes.faults.preloaded"
POLL = 0.02  # seconds


class Start(Protocol):
    """The processes of one start."""

    def ranks(self) -> list[int]: ...  # their process ids, in the order of ranks; fewer while it starts
    def kill(self, ranks: Sequence[int]) -> None: ...  # SIGKILL, in this order; all ranks: whatever watches over them, too
    def codes(self) -> list[int | None]: ...  # exit codes, negative for signals; None while running
    def close(self) -> None: ...  # kills what is left


def wait(start: Start, seconds: float) -> bool:
    """Whether all its processes have ended in time."""
    deadline = time.monotonic() + seconds
    while None in start.codes():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL)
    return True


def creep(pid: int, there: Callable[[], bool], slowly: Callable[[], bool], seconds: float = 30.0) -> None:
    """Stops a process at a moment too short to be met: when `there` holds. It runs in slices, short ones once `slowly` holds."""
    until = time.monotonic() + seconds
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        while time.monotonic() < until:
            process.suspend()
            while process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE) and time.monotonic() < until:
                time.sleep(0.0001)  # what it asked of the kernel, it gets first
            if there():
                return
            process.resume()
            time.sleep(0.0001 if slowly() else 0.001)


def proceed(pids: Sequence[int]) -> None:
    """Has processes that `creep` left stopped run on."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).resume()


class Forked:
    """Ranks forked from a process that has imported everything."""

    def __init__(self, words: Sequence[str], log: Path):
        from torch.distributed import TCPStore

        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as recipes/processes.py has it
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([PRELOADED])
        self.processes = []
        with environment_of(ENVIRONMENT), _without_main():
            for number in range(RANKS):
                env = processes.environment({}, number, RANKS, self.store.port) | ENVIRONMENT
                del env[processes.WATCHER]  # its parent is the fork server
                process = context.Process(target=rank, args=(list(words), str(log), env), daemon=True)
                process.start()
                self.processes.append(process)

    def ranks(self) -> list[int]:
        return [process.pid for process in self.processes if process.pid is not None]

    def kill(self, ranks: Sequence[int]) -> None:
        for number in ranks:
            self.processes[number].kill()

    def codes(self) -> list[int | None]:
        return [process.exitcode for process in self.processes]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def rank(words: list[str], log: str, env: dict[str, str]) -> None:
    """The life of a forked rank: what `python -m recipes.cli pretrain WORDS` does, everything said at the end of `log`."""
    if (threads := len(os.listdir(f"/proc/{os.getppid()}/task"))) > 1:
        raise RuntimeError(f"the fork server has {threads} threads: what was imported in it must compute nothing")
    if PRELOADED not in sys.modules:
        raise RuntimeError(f"{PRELOADED} could not be imported by the fork server")
    os.setsid()  # Ctrl-C is the harness's
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.update(env)
    from recipes import cli

    sys.exit(cli.main(["pretrain", *words]))


class Command:
    """The command as a user types it: a process that watches, and the ranks that it starts."""

    def __init__(self, words: Sequence[str], log: Path):
        command = [sys.executable, "-m", "recipes.cli", "pretrain", *words]
        env = os.environ | ENVIRONMENT | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with log.open("a") as file:
            self.watcher = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        self._ranks: list[psutil.Process] = []

    def ranks(self) -> list[int]:
        return [process.pid for process in self._found()]

    def kill(self, ranks: Sequence[int]) -> None:
        found = self._found()
        if len(ranks) == RANKS or len(found) < RANKS:
            self.watcher.kill()
        for number in ranks:
            with contextlib.suppress(IndexError, psutil.NoSuchProcess):
                found[number].kill()

    def codes(self) -> list[int | None]:
        code = self.watcher.poll()
        if any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in self._living()):
            code = None
        return [code]

    def close(self) -> None:
        self.kill(range(RANKS))
        self.watcher.kill()
        self.watcher.wait()

    def _living(self) -> Iterator[psutil.Process]:
        for process in self._found():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.status()
                yield process

    def _found(self) -> list[psutil.Process]:
        if len(self._ranks) < RANKS and self.watcher.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._ranks = sorted(psutil.Process(self.watcher.pid).children(), key=lambda process: process.create_time())
        return self._ranks


STARTS: dict[str, Callable[[Sequence[str], Path], Start]] = {"fork": Forked, "command": Command}


@contextlib.contextmanager
def environment_of(more: dict[str, str]) -> Iterator[None]:
    """While entered, the environment that processes of this one start with has `more`."""
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Has the fork server's children not import this process's main program, which may be pytest, again."""
    main: Any = sys.modules["__main__"]
    kept = {name: main.__dict__[name] for name in ("__spec__", "__file__") if name in main.__dict__}
    main.__dict__.update(dict.fromkeys(kept))
    try:
        yield
    finally:
        main.__dict__.update(kept)
