"""`k3 posttrain`: the whole way on one machine, verb by verb: pretrain, extend, sft, two experts by rl, and their distillation.

Each stage is a run of its own in `dir/NAME`, as `k3 VERB` would make it; a stage that is there already goes on or is left as it
is. At the end every model answers the same held-out tasks, and a table and a picture say what each stage was worth.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.console import say
from recipes.errors import UserError, suggestion, word
from recipes.exam import Grades, gain, grades_of, interval, read

# tasks whose answers are short, do not stand in the prompt, and come within reach of a model of a million parameters in minutes
DOMAINS: dict[str, list[str]] = {
    "arithmetic": ["chain_sum"],
    "words": ["family_relationships", "leg_counting"],
}
PARAMETERS = {
    "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    "leg_counting": {"min_animals": 1, "max_animals": 2, "min_instances": 1, "max_instances": 5},
}
KEPT = 0.9  # of each expert's gain that its student shall have


@dataclass(frozen=True)
class Stage:
    name: str
    phase: str
    after: str | None
    words: tuple[str, ...]


def stages(folder: Path) -> list[Stage]:
    every = [name for names in DOMAINS.values() for name in names]
    parameters = tuple(f"tasks.parameters.{g}.{key}={value}" for g, of in PARAMETERS.items() for key, value in of.items())

    def tasks(names: Sequence[str]) -> tuple[str, ...]:
        return (f"tasks.generators=[{','.join(names)}]", *(p for p in parameters if p.split(".")[2] in names))

    experts = [
        Stage(f"rl-{domain}", "rl", "sft", (*tasks(names), "run.steps=40"))
        for domain, names in DOMAINS.items()
    ]
    teachers = ",".join(f"{name}:{folder / f'rl-{domain}'}" for domain, names in DOMAINS.items() for name in names)
    return [
        Stage("pretrain", "pretrain", None, ("recipe=nano", "run.steps=60")),
        Stage("extend", "extend", "pretrain", ("run.steps=20",)),
        Stage("sft", "sft", "extend", (*tasks(every), "run.steps=300")),
        *experts,
        Stage("distill", "distill", "sft", (*tasks(every), f"distill.teachers=[{teachers}]", "run.steps=40")),
    ]
