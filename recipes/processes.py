"""The processes of a parallel layout: those a launcher has started, which this one joins, or those it starts itself.

torchrun and srun say in the environment which of how many this process is. Without them, a layout of several processes gets one
process a rank on this machine, and this one watches over them. Not through torchrun: it kills a rank that still saves 30 seconds
after a SIGTERM, dies of SIGUSR1, and ends with 1 whatever the ranks end with.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from recipes.launch import CHOSEN, physical_cores

GRACE = 30.0  # seconds for the other ranks to end after one has failed
POLL = 0.05  # seconds
WATCHER = "K3_WATCHER"  # the process that started the ranks
SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}


def joined(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of torch.distributed for a process that srun started; nothing where they are set or MASTER_ADDR is not."""
    if "RANK" in env or "MASTER_ADDR" not in env or not all(name in env for name in SLURM.values()):
        return {}
    return {ours: env[theirs] for ours, theirs in SLURM.items()} | {"MASTER_PORT": env.get("MASTER_PORT", "29500")}


def count(env: Mapping[str, str]) -> int | None:
    """How many processes a launcher has started, this one among them; None without a launcher."""
    return int(env.get("WORLD_SIZE", "1")) if "RANK" in env and "MASTER_ADDR" in env else None


def rank(env: Mapping[str, str]) -> int:
    """Which of them this one is; 0 without a launcher."""
    return int(env["RANK"]) if count(env) is not None else 0


def run(words: Sequence[str], size: int) -> int:
    """`k3 WORDS` on `size` ranks of this machine. Returns the exit code of the rank that failed first, else 0.

    SIGINT, SIGTERM and SIGUSR1 go on to every rank. After a failure the others have GRACE seconds to end by themselves.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the meeting point: no port is chosen twice
    watch = _Watch()
    before = {number: signal.signal(number, watch.forward) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        for number in range(size):
            command = [sys.executable, "-P", "-m", "recipes.cli", *words]
            env = environment(os.environ, number, size, store.port)
            # a session of their own: Ctrl-C reaches this process alone, which tells them once
            watch.ranks.append(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True))
        return watch.wait()
    finally:
        watch.kill()
        for number, handler in before.items():
            signal.signal(number, handler)


def environment(env: Mapping[str, str], number: int, size: int, port: int) -> dict[str, str]:
    out = {
        **env,
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch.distributed's word for: the store is there already
        "TORCHELASTIC_RESTART_COUNT": "0",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        WATCHER: str(os.getpid()),
    }
    if "OMP_NUM_THREADS" not in env or "OMP_NUM_THREADS" in env.get(CHOSEN, "").split(","):
        out["OMP_NUM_THREADS"] = str(max(1, physical_cores() // size))
    return out


class _Watch:
    def __init__(self) -> None:
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.sent: set[int] = set()

    def forward(self, number: int, frame: FrameType | None) -> None:
        self.sent.add(number)
        for process in self.ranks:
            if process.poll() is None:
                process.send_signal(number)

    def wait(self) -> int:
        running = dict(enumerate(self.ranks))
        code, deadline = 0, float("inf")
        while running:
            for number, process in list(running.items()):
                if (status := process.poll()) is None:
                    continue
                del running[number]
                if status and not code:
                    code = status if status > 0 else 128 - status
                    deadline = time.monotonic() + GRACE
                if status < 0 and -status not in self.sent:
                    name = signal.strsignal(-status) or f"signal {-status}"
                    print(f"k3: rank {number} of {len(self.ranks)} was ended: {name}", file=sys.stderr)
            if time.monotonic() > deadline:
                self.sent.add(signal.SIGKILL)
                self.kill()
            time.sleep(POLL)
        return code

    def kill(self) -> None:
        for process in self.ranks:
            if process.poll() is None:
                process.kill()


def follow(env: Mapping[str, Any]) -> None:
    """Has this rank asked to stop when the process that watches over it dies. Does nothing elsewhere.

    By SIGUSR1, because Linux may send the signal once a thread, and a second SIGTERM would stop at once.
    """
    if WATCHER not in env or not sys.platform.startswith("linux"):
        return
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)
    if os.getppid() != int(env[WATCHER]):
        raise SystemExit(1)  # it has died already
