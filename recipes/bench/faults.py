"""`k3 bench faults`: a run in two processes, killed at random moments, continues and ends as if nothing had happened."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from recipes.console import say
from recipes.errors import UserError, suggestion
from recipes.faults.plan import EVERY, STEPS, Moment, Victim
from recipes.faults.start import STARTS
from recipes.faults.trial import Faults, Killed, Trial
from recipes.summary import versions

PRECISIONS = ("fp32", "bf16")
SHOWN = 5  # differences of a trial


def run(n: str = "10", precision: str = "both", seed: str = "0", start: str = "fork") -> int:
    """Does `n` trials in each `precision` (fp32, bf16 or both), of which trial i has the seed `seed` + i, and prints the table.

    start=command starts what a user types, at half a minute a start, in the place of ranks forked from a process that has
    imported everything. Returns 1 when any trial went wrong; what it left stays then. Raises UserError for a wrong value.
    """
    count, first = _number("n", n, 1), _number("seed", seed, 0)
    chosen = PRECISIONS if precision == "both" else (_one_of("precision", precision, (*PRECISIONS, "both")),)
    _one_of("start", start, STARTS)
    say(", ".join(f"{name} {value}" for name, value in versions().items()))
    say(f"model=tiny with 4 layers, parallel.dp=2 parallel.ep=2, {STEPS} steps, a save every {EVERY} in the background")
    home, failed = Path(tempfile.mkdtemp(prefix="faults-")), 0
    for name in chosen:
        faults = Faults(home, name, start)
        trials = []
        for number in range(first, first + count):
            trials.append(faults.trial(number))
            if trials[-1].wrong:
                say(f"{name}: seed {number}: {trials[-1].wrong[0]}")
        for line in table(name, trials, start):
            say(line)
        failed += sum(bool(trial.wrong) for trial in trials)
    if failed:
        say(f"what the failed trials left is in {home}")
        return 1
    shutil.rmtree(home)
    return 0


def table(precision: str, trials: Sequence[Trial], start: str = "fork") -> Iterator[str]:
    """A row for each pair of a moment and a victim, by where the kills were found to have fallen; then what went wrong.

    `went on from`: steps of the checkpoints, and how often; 0 is the beginning. `equal`: kills of trials that ended as the
    undisturbed run, bit for bit.
    """
    kills = [(killed, trial) for trial in trials for killed in trial.kills]
    seconds = sum(trial.seconds for trial in trials)
    good = sum(not trial.wrong for trial in trials)
    hit = sum(killed.moment is not None for killed, _ in kills)
    yield (
        f"precision={precision}: {len(trials)} trials with {hit} kills in {seconds:.0f} s; "
        f"{good} of {len(trials)} ended bitwise as the undisturbed run"
    )
    yield f"{'killed':<16}{'victim':<9}{'kills':>6}{'equal':>7}  went on from (step x times)"
    for moment in Moment:
        for victim in Victim:
            row = [(k, t) for k, t in kills if k.moment is moment and k.kill.victim is victim]
            if row:
                went = Counter(killed.continued for killed, _ in row)
                steps = ", ".join(f"{step} x {times}" for step, times in sorted(went.items()))
                equal = sum(not trial.wrong for _, trial in row)
                yield f"{moment.value:<16}{victim.value:<9}{len(row):>6}{equal:>7}  {steps}"
    yield from _notes([killed for killed, _ in kills])
    for trial in trials:
        if trial.wrong:
            again = f"k3 bench faults n=1 precision={precision} seed={trial.seed}" + (f" start={start}" * (start != "fork"))
            yield f"seed {trial.seed} went wrong; `{again}` tries the same kills again:"
            yield from (f"  {line}" for line in trial.wrong[:SHOWN])
            if (more := len(trial.wrong) - SHOWN) > 0:
                yield f"  ... and {more} more"


def _notes(kills: Sequence[Killed]) -> Iterator[str]:
    survived = [killed.survived for killed in kills if killed.survived is not None]
    if survived:
        yield f"the other rank ended by itself {len(survived)} times, after {max(survived):.1f} s at most"
    if late := sum(killed.moment is None for killed in kills):
        yield f"{late} kills came after the run had ended"


def _number(key: str, value: str, least: int) -> int:
    if not value.isdecimal() or int(value) < least:
        raise UserError(f"{key}={value}: must be a whole number from {least} on; give {key}={max(least, 20)}")
    return int(value)


def _one_of(key: str, value: str, known: Collection[str]) -> str:
    if value not in known:
        raise UserError(f"{key}={value}: no such {key}{suggestion(value, known)}; give one of {', '.join(known)}")
    return value
