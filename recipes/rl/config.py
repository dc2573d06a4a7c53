"""The dials of `k3 rl` and `k3 distill`. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Effort(Enum):
    none = "none"  # prompts say nothing of effort
    low = "low"
    high = "high"
    max = "max"


class Even(Enum):
    drop = "drop"  # left out of the update, to which they add nothing but time; where all groups are, one stays
    keep = "keep"


@dataclass
class BudgetConfig:
    """Length control: a trajectory longer than factor x b0 has reward -1, b0 the mean length of the initial model's answers in
    the prompt's domain. The factor falls linearly from `start` to `end` over the run (large is max effort, small is low).
    """

    # answers longer than this times the initial model's (mean tokens in their domain) have reward -1; null: no budget
    start: float | None = None
    end: float = 1.0  # to which that factor falls, linearly over the run


@dataclass
class RlConfig:
    prompts: int = 32  # groups that are sampled at a time, over all data ranks
    samples: int = 8  # trajectories of each prompt
    # share of unfinished trajectories that must finish before the update; the others go on in the next step
    complete: float = 1.0
    max_new_tokens: int = 64  # of a trajectory
    low: float = 0.8  # the ratio of the policies is clipped to [low, high]
    high: float = 1.25
    tau: float = 0.01  # weight of the squared log-ratio, which holds each token near the policy that drew it
    even: Even = Even.drop  # what becomes of groups whose trajectories all have the same reward
    effort: Effort = Effort.none  # stated in every prompt
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    slots: int = 64  # trajectories that one data rank goes on with at once; more wait for a place


@dataclass
class DistillConfig:
    # an expert for each domain, as DOMAIN:PATH, or DOMAIN/EFFORT:PATH; PATH is a run, a checkpoint or a published folder
    teachers: list[str] = field(default_factory=list)
    # nats: a token's log-ratio of teacher and student is clipped to [-limit, limit]; 1: as rewards of 0 and 1 are
    limit: float = 1.0


@dataclass(frozen=True)
class Teacher:
    domain: str
    effort: Effort
    path: str


def teachers(cfg: DistillConfig) -> list[Teacher]:
    """The teachers as typed. Raises ValueError for one that is no DOMAIN[/EFFORT]:PATH, or that is given twice."""
    found: dict[tuple[str, Effort], Teacher] = {}
    for text in cfg.teachers:
        of, colon, path = text.partition(":")
        domain, slash, effort = of.partition("/")
        if not colon or not path or not domain or (slash and effort not in Effort.__members__):
            efforts = ", ".join(Effort.__members__)
            raise ValueError(f"{text} is no DOMAIN:PATH, nor DOMAIN/EFFORT:PATH with an effort of {efforts}")
        teacher = Teacher(domain, Effort[effort] if slash else Effort.none, path)
        if (key := (teacher.domain, teacher.effort)) in found:
            raise ValueError(f"{text}: {of} has a teacher already, {found[key].path}")
        found[key] = teacher
    return list(found.values())


def refusals(r: RlConfig) -> Iterator[tuple[str, Any, str]]:
    """(key, value, what is wrong and the fix)."""
    for name, least in (("prompts", 1), ("samples", 2), ("max_new_tokens", 1), ("slots", 1)):
        if (value := getattr(r, name)) < least:
            why = "; a group's mean is what its trajectories are compared with" if name == "samples" else ""
            yield f"rl.{name}", value, f"must be at least {least}{why}"
    if not 0 < r.complete <= 1:
        yield "rl.complete", r.complete, "is a share: must lie in (0, 1]"
    if not 0 <= r.low <= 1 <= r.high:
        yield "rl.low", r.low, f"the clipped ratio must hold 1: give 0 <= rl.low <= 1 <= rl.high (rl.high={r.high})"
    if not r.tau >= 0:
        yield "rl.tau", r.tau, "must be at least 0"
    b = r.budget
    if b.start is not None and not b.start > 0:
        yield "rl.budget.start", b.start, "is a factor of the initial model's lengths: must be above 0, or null for no budget"
    elif b.start is not None and not 0 < b.end <= b.start:
        yield "rl.budget.end", b.end, f"must lie in (0, rl.budget.start={b.start}]"
