"""What tests have each of several ranks do (parallel.local forks them): a small run, undisturbed or with one thing gone wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from recipes import training
from recipes.compose import compose
from recipes.trainer import Callback, StepResult, Trainer


class Disturb(Callback):
    """On rank 1, at one step: raises, is asked to stop, or has lost its losses in the next step."""

    def __init__(self, how: str, at: int):
        self.how, self.at = how, at

    def step(self, trainer: Trainer, result: StepResult) -> None:
        if trainer.objective.world.rank != 1 or result.step != self.at:
            return
        if self.how == "raise":
            raise ArithmeticError("rank 1 has had enough")
        if self.how == "signal":
            os.kill(os.getpid(), signal.SIGUSR1)
        if self.how == "nan":
            share = trainer.objective.share
            spoilt = lambda *values: tuple(x * torch.nan for x in share(*values))
            object.__setattr__(trainer.objective, "share", spoilt)


def hang_up(code: int, leave: Callable[[int], NoReturn] = os._exit) -> NoReturn:
    """Ends as a rank does, but stays for a while after its connections have closed: the others have time to fail of that."""
    for name in os.listdir("/proc/self/fd"):
        path = Path("/proc/self/fd") / name
        if path.is_symlink() and os.readlink(path).startswith("socket:"):
            with contextlib.suppress(OSError):
                connection = socket.socket(fileno=os.dup(int(name)))
                connection.getpeername()  # raises for one that listens: gloo would abort the process
                connection.shutdown(socket.SHUT_RDWR)
    time.sleep(5)
    leave(code)


def train(words: list[str], said: str | None = None, disturb: tuple[str, int] | None = None) -> dict[str, Any]:
    """`k3 pretrain words...` on this rank. Everything it prints goes to the end of the file `said`."""
    if said is not None:
        file = Path(said).open("a")
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    trained: list[Trainer] = []

    def run(trainer: Trainer, steps: int) -> bool:
        trained.append(trainer)
        return original(trainer, steps)

    original, Trainer.run = Trainer.run, run
    if disturb is not None and disturb[0] == "raise":
        os._exit = hang_up  # type: ignore[assignment]
    if disturb is not None:
        # in the place of the progress bar, which rank 1 does not have
        training.cb.on_first = lambda world, callback: Disturb(*disturb)
    code = training.train(compose(words))
    return {"code": code, "progress": trained[0].progress, "skipped": trained[0].optimizer.skipped_count}
