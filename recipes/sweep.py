"""`k3 pretrain --multirun key=a,b`: a run for every combination, one after another, each in a folder of its own."""

from __future__ import annotations

import datetime
import itertools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from recipes.compose import compose
from recipes.console import say
from recipes.errors import UserError, first_line

FLAGS = ("-m", "--multirun")


def combinations(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """(what tells a run from the others, its words) for every combination, the last key's values changing fastest.

    Raises UserError where nothing varies.
    """
    fixed, varied = [], []
    for word in words:
        values = _values(word)
        if values is None:
            fixed.append(word)
        else:
            key = word.split("=", 1)[0]
            varied.append([f"{key}={value}" for value in values])
    if not varied:
        raise UserError(f"{FLAGS[1]}: no key has several values; give some, as in optim.lr=1e-3,3e-3, or leave it out")
    return [(" ".join(chosen), [*fixed, *chosen]) for chosen in itertools.product(*varied)]


def run(verb: str, words: Sequence[str]) -> int:
    """Composes every run before the first starts, so that a mistake in the last costs nothing. Returns the first exit code that
    is not 0, after all have run, or at once where one was interrupted.
    """
    runs, given = combinations(words), [word for word in words if word.startswith("run.dir=")]
    base = given[0].split("=", 1)[1] if given else f"runs/sweep-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    if any(word.startswith("run.resume=") for word in words):
        raise UserError(f"{FLAGS[1]}: starts new runs; continue one of them with k3 {verb} run.resume=FOLDER")
    placed = []
    for number, (name, of) in enumerate(runs):
        of = [*(word for word in of if not word.startswith("run.dir=")), f"run.dir={Path(base) / str(number)}"]
        compose(of, verb)
        placed.append((name, of))
    code = 0
    for number, (name, of) in enumerate(placed):
        say(f"run {number + 1} of {len(placed)}: {name}")
        ended = subprocess.run([sys.executable, "-P", "-m", "recipes.cli", verb, *of]).returncode
        code = code or ended
        if ended in (130, -2):
            break
    say(f"{len(placed)} runs in {base}")
    return code


def _values(word: str) -> Iterator[str] | None:
    """The values of a word that has several, each as it is typed; None for one that has one."""
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException as error:
        raise UserError(f"{word}: {first_line(error)}") from error
    if not override.is_sweep_override():
        return None
    if not override.is_choice_sweep() and not override.is_range_sweep():
        raise UserError(f"{word}: give values, as in a,b,c or range(1,4)")
    return override.sweep_string_iterator()  # type: ignore[return-value]
