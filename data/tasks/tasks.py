"""Training tasks without end and a fixed held-out set, which share no prompt.

A prompt's side is the hash of its words: it is held out for good, whatever the seed, the generator or its parameters, so that a
generator with few instances cannot leak one. Training task number i is a pure function of (configuration, i): a resume needs i.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict
from hashlib import blake2b
from importlib.metadata import version
from typing import Any, Protocol

import numpy as np

from data.errors import DataError
from data.stream import shuffled
from data.tasks import folder
from data.tasks.config import TasksConfig, validate
from data.tasks.generators import Generator, parameters
from data.tasks.task import Task, place

log = logging.getLogger(__name__)

_TRIES = 1000  # draws in a row from the wrong side after which a generator counts as having no instance on the other
_HELDOUT_KEY = 20260731  # draws of the held-out set: not tasks.seed, so that accuracies of all runs are of the same tasks


class _Source(Protocol):
    def train(self, turn: int) -> Task: ...
    def heldout(self, count: int) -> list[Task]: ...
    def rewards(self) -> set[str]: ...


class Tasks:
    """Raises DataError for what cannot be used: a name, a parameter, a line of the user's file."""

    def __init__(self, cfg: TasksConfig):
        validate(cfg)
        self._sources: list[_Source] = []
        for number, name in enumerate(cfg.generators):
            generator = Generator(name, parameters(name, cfg.preset, cfg.parameters.get(name, {})))
            self._sources.append(_Generated(generator, (cfg.seed, number), cfg.heldout_fraction))
        if cfg.folder is not None:
            self._sources.append(_Given(cfg.folder, cfg.seed, cfg.heldout_fraction))
        self._cfg = cfg

    @property
    def turns(self) -> int:
        """After so many tasks it is the same source's turn."""
        return len(self._sources)

    @property
    def fingerprint(self) -> str:
        """Names what tasks there are, and in which order."""
        made_by: dict[str, Any] = asdict(self._cfg)
        if self._cfg.folder is not None:
            made_by["folder"] = [task.id for task in folder.read(self._cfg.folder)]
        if self._cfg.generators:
            made_by["reasoning-gym"] = version("reasoning-gym")
        return blake2b(json.dumps(made_by, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()

    def train(self, number: int) -> Task:
        """Task `number` (from 0) of training; sources take turns."""
        return self._sources[number % len(self._sources)].train(number // len(self._sources))

    def stream(self, start: int = 0) -> Iterator[Task]:
        """Training tasks from number `start` on, without end."""
        while True:
            yield self.train(start)
            start += 1

    def heldout(self) -> list[Task]:
        """`cfg.heldout` tasks with distinct prompts, the sources in turn, or all that there are (a log line says so)."""
        sources = list({self._name(i): source for i, source in reversed(list(enumerate(self._sources)))}.values())[::-1]
        shares = [len(range(i, self._cfg.heldout, len(sources))) for i in range(len(sources))]
        found = [source.heldout(share) for source, share in zip(sources, shares)]
        turns = max(map(len, found), default=0)
        mixed = [tasks[turn] for turn in range(turns) for tasks in found if turn < len(tasks)]
        chosen = list({" ".join(task.prompt.split()): task for task in reversed(mixed)}.values())[::-1]
        if not chosen:
            raise DataError("tasks: no source has a held-out task; raise tasks.heldout_fraction or give more tasks")
        if len(chosen) < self._cfg.heldout:
            log.warning("tasks.heldout=%d: there are only %d such prompts; all are used", self._cfg.heldout, len(chosen))
        return chosen

    def rewards(self) -> frozenset[str]:
        """Rewards that tasks ask for by themselves; "own" where a generator scores by a rule of its own."""
        return frozenset().union(*(source.rewards() for source in self._sources))

    def _name(self, number: int) -> str:
        names = self._cfg.generators
        return names[number] if number < len(names) else ""


class _Generated:
    def __init__(self, generator: Generator, key: tuple[int, ...], fraction: float):
        self._generator, self._key, self._fraction = generator, key, fraction

    def train(self, turn: int) -> Task:
        for index in _draws(*self._key, turn):
            task = self._generator.task(index)
            if place(task.prompt) >= self._fraction:
                return task
        raise DataError(
            f"tasks.generators={self._generator.name}: {_TRIES} instances in a row are all held out; it has too few prompts with "
            "these tasks.parameters"
        )

    def heldout(self, count: int) -> list[Task]:
        found: dict[str, Task] = {}
        turn = fresh = 0
        while len(found) < count and fresh < 20:  # rounds of _TRIES draws without a new prompt
            before = len(found)
            for index in _draws(_HELDOUT_KEY, turn):
                task = self._generator.task(index)
                if place(task.prompt) < self._fraction and len(found) < count:
                    found.setdefault(" ".join(task.prompt.split()), task)
            turn += 1
            fresh = 0 if len(found) > before else fresh + 1
        return list(found.values())

    def rewards(self) -> set[str]:
        return {"own"} if self._generator.own_score else set()


def _draws(*key: int) -> list[int]:
    """_TRIES numbers below 2^31 that `key` sets, on every machine."""
    return [int(raw >> 33) for raw in np.random.Philox(np.random.SeedSequence(key)).random_raw(_TRIES)]


class _Given:
    def __init__(self, setting: str, seed: int, fraction: float):
        tasks = folder.read(setting)
        self._held = [task for task in tasks if place(task.prompt) < fraction]
        self._train = [task for task in tasks if place(task.prompt) >= fraction]
        self._seed = seed
        if not self._train:
            raise DataError(f"tasks.folder={setting}: all {len(tasks)} task(s) are held out; give more")

    def train(self, turn: int) -> Task:
        epoch, here = divmod(turn, len(self._train))
        return self._train[int(shuffled(len(self._train), self._seed, epoch)[here])]

    def heldout(self, count: int) -> list[Task]:
        return [self._held[i] for i in shuffled(len(self._held), _HELDOUT_KEY)[:count]]

    def rewards(self) -> set[str]:
        return {task.metadata["reward"] for task in [*self._train, *self._held] if "reward" in task.metadata}
