"""What one trial does, drawn from its seed: consecutive seeds go through all pairs of a moment and a victim."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum

STEPS = 9  # of every run
EVERY = 3  # steps between saves
AGAIN = 0.25  # share of the trials in which the restarted run is killed, too


class Moment(Enum):
    starting = "starting"  # before the first step of this start
    before = "before a save"  # in a step, or between two, with no save begun by it
    writing = "while writing"  # the hidden work folder is there
    renamed = "before latest"  # the checkpoint has its name, and `latest` names the one before
    removing = "while removing"  # `latest` has moved, and the checkpoint before is being removed
    after = "after a save"  # `latest` has moved, and the next step runs, or the run ends


class Victim(Enum):
    first = "rank 0"
    second = "rank 1"
    everyone = "all"


@dataclass(frozen=True)
class Kill:
    """moment: what is waited for; step: in which the kill falls, or whose save it disturbs; wait: how far into it, 0 to 1."""

    moment: Moment
    victim: Victim
    step: int
    wait: float


def plan(seed: int) -> list[Kill]:
    """The kills of the trial `seed`, one a start of the run; the same for the same seed."""
    rng = random.Random(seed)
    moments, victims = list(Moment), list(Victim)
    turn, number = divmod(seed, len(moments))
    kills = [_kill(rng, moments[number], victims[(number + turn) % len(victims)])]  # all pairs in 18 seeds
    if rng.random() < AGAIN:
        kills.append(_kill(rng, rng.choice(moments), rng.choice(victims)))
    return kills


def _kill(rng: random.Random, moment: Moment, victim: Victim) -> Kill:
    return Kill(moment, victim, rng.choice(targets(moment)), rng.random())


def targets(moment: Moment) -> list[int]:
    """The steps that a kill may fall behind: those after which no save begins, or those whose save it disturbs."""
    if moment is Moment.before:
        return [step for step in range(1, STEPS + 1) if step % EVERY]
    return list(range(2 * EVERY if moment is Moment.removing else EVERY, STEPS + 1, EVERY))
