"""What a person wants to be woken for: steps that the guard skips, steps that no longer come, and a run that fails."""

from __future__ import annotations

import threading
from typing import Protocol

from recipes.trainer import StepResult

POLL = 5.0  # seconds between two looks at the clock, at most


class Send(Protocol):
    def __call__(self, title: str, text: str, *, error: bool = False) -> None: ...


class Alerts:
    """Says each thing once, until it has passed. `patience`: seconds without a step that are a stall; 0: none is.

    A thread looks at the clock, since a run that stands still runs nothing else.
    """

    def __init__(self, send: Send, patience: float):
        self.send, self.patience = send, patience
        self._skipping = False
        self._stepped, self._ended = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._last = 0

    def start(self) -> None:
        if self.patience > 0:
            self._thread = threading.Thread(target=self._watch, name="watches for stalls", daemon=True)
            self._thread.start()

    def step(self, result: StepResult) -> None:
        self._last = result.step
        self._stepped.set()
        if result.report.skipped and not self._skipping:
            self.send(f"step {result.step} was skipped", f"{result.report.reason}; loss {result.losses[0]:.4g}")
        self._skipping = result.report.skipped

    def close(self, failure: BaseException | None) -> None:
        """`failure`: what training ended with; None: nothing has failed."""
        self._ended.set()
        self._stepped.set()
        if self._thread is not None:
            self._thread.join()
        if failure is not None:
            text = (str(failure).strip().splitlines() or [""])[0]
            self.send(f"failed after step {self._last}", f"{type(failure).__name__}: {text}", error=True)

    def _watch(self) -> None:
        while not self._ended.is_set():
            if self._stepped.wait(self.patience):
                self._stepped.clear()
                self._ended.wait(min(POLL, self.patience))  # not at every step: they may be short
                continue
            self.send("no step", f"none for {self.patience / 60:.3g} minutes after step {self._last}", error=True)
            self._stepped.wait()
