"""Ctrl-C, SIGTERM and SIGUSR1: finish the step, save, say how to resume. A second Ctrl-C or SIGTERM stops at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from parallel.world import World
from recipes.console import say

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Interrupts:
    """While entered, the first signal only sets `received`; after it the system's own handling is back, so the next one kills."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers there only
            self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return self.received is not None

    def agreed(self, world: World) -> bool:
        """Whether any rank has been asked to stop: the same answer on all of them, which must call it at the same points."""
        if world.size > 1:
            number = torch.tensor(int(self.received or 0), device=world.device)
            dist.all_reduce(number, op=dist.ReduceOp.MAX)
            if heard := int(number):
                if self.received is None:
                    say(f"{signal.Signals(heard).name} at another rank: saving")
                self.received = signal.Signals(heard)
        return bool(self)

    @property
    def exit_code(self) -> int:
        """130 for Ctrl-C; 0 for SIGTERM and SIGUSR1, whose senders (a scheduler) expect a saved run to end well."""
        return 130 if self.received == signal.SIGINT else 0

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        # in C and not in Python: a handler of ours would wait for the matrix product that is running
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        say(f"{self.received.name}: finishing what runs, then saving (Ctrl-C again stops at once, without saving)")
