"""Chooses an operator's implementation and says so once: which path runs, and why the faster ones were refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("k3.kernels")
_said: set[str] = set()


@dataclass(frozen=True)
class Backend:
    """One implementation. `refuses(...)` gets the operator's arguments; it returns None, or why it cannot take them."""

    name: str
    run: Callable[..., Any]
    refuses: Callable[..., str | None] = lambda *args, **kwargs: None


def survey(backends: Sequence[Backend], *args: Any, only: str | None = None, **kwargs: Any) -> tuple[Backend | None, list[str]]:
    """The first backend (fastest first) that takes the arguments, or the one named by `only`, and why those before it do not."""
    refusals: list[str] = []
    for backend in backends:
        if only is not None and backend.name != only:
            continue
        reason = backend.refuses(*args, **kwargs)
        if reason is None:
            return backend, refusals
        refusals.append(f"{backend.name} refused: {reason}")
    return None, refusals


def choose(operator: str, backends: Sequence[Backend], *args: Any, only: str | None = None, **kwargs: Any) -> Backend:
    """The backend that `survey` finds; says so once.

    Raises ValueError naming every backend and its reason when none does.
    """
    backend, refusals = survey(backends, *args, only=only, **kwargs)
    if backend is not None:
        line = f"{operator}: {backend.name}" + (f" ({'; '.join(refusals)})" if refusals else "")
        if line not in _said:
            _said.add(line)
            log.info(line)
        return backend
    if not refusals:
        raise ValueError(f"{operator}: no backend named {only!r}; there are {', '.join(b.name for b in backends)}")
    raise ValueError(f"{operator}: no backend takes these arguments: {'; '.join(refusals)}")
