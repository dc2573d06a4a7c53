"""Exams: the intervals that say what is significant, and what needs no prompt to be read."""

from __future__ import annotations

import json
import math
import random
import statistics
from types import SimpleNamespace
from typing import Any

import pytest

from data.tasks import Task
from recipes.config import ExamConfig
from recipes.exam import Exam, Grades, gain, grades_of, interval, lines, picture


@pytest.mark.parametrize("right, of", [(0, 10), (3, 10), (50, 128), (128, 128)])
def test_of_one_answer_a_task_the_interval_is_wilsons(right: int, of: int) -> None:
    """Its ends are the chances from which the share is 1.96 standard deviations away."""
    low, high = interval([1.0] * right + [0.0] * (of - right))
    assert -1e-12 <= low < high <= 1 + 1e-12
    for end in (low, high):
        assert abs(right / of - end) == pytest.approx(1.96 * math.sqrt(max(0.0, end * (1 - end)) / of), abs=1e-6)


def _policies(draw: random.Random, tasks: int, samples: int, more: float) -> tuple[list[float], list[float], float]:
    """Tasks of different hardness, answered before and after every chance has moved up by `more` of the way to 1."""
    before, after, true = [], [], []
    for _ in range(tasks):
        chance = draw.random()
        better = chance + more * (1 - chance)
        true.append(better - chance)
        before.append(sum(draw.random() < chance for _ in range(samples)) / samples)
        after.append(sum(draw.random() < better for _ in range(samples)) / samples)
    return before, after, more / 2  # of the mean over all tasks there could be


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("more", [0.0, 0.2])
def test_in_95_of_100_exams_the_gain_lies_in_its_interval(samples: int, more: float) -> None:
    draw, inside = random.Random(0), []
    for _ in range(2000):
        before, after, true = _policies(draw, 60, samples, more)
        mean, low, high = gain(before, after)
        assert mean == pytest.approx(statistics.fmean(after) - statistics.fmean(before)) and low <= high
        inside.append(low <= true <= high)
    off = 3 * math.sqrt(0.95 * 0.05 / len(inside))
    assert 0.95 - off - 0.01 <= statistics.fmean(inside) <= 0.95 + off + 0.01


def _tasks(*answers: tuple[str, str]) -> list[Task]:
    return [Task(f"t:{i}", "?", answer, domain) for i, (domain, answer) in enumerate(answers)]


def _exam(tasks: list[Task]) -> Exam:
    dialogue: Any = SimpleNamespace(stop=())
    world: Any = None
    return Exam(dialogue, world, tasks, ExamConfig())


def test_one_answer_to_all_tasks_of_a_domain() -> None:
    """Told beside what was answered; tasks that tests judge have no answer to guess."""
    tasks = _tasks(("a", "2"), ("a", "2."), ("a", "3"), ("a", "4"), ("b", "x"), ("c", ""), ("c", ""))
    exam = _exam(tasks)
    assert exam.guesses == {"a": 0.5, "b": 1.0}
    domains = tuple(task.domain for task in tasks)
    before = Grades((0.0,) * 7, domains, (1.0,) * 7, (0.5,) * 7, exam.guesses)
    after = Grades((1.0,) * 7, domains, (1.0,) * 7, (0.0,) * 7, exam.guesses)
    every, a, b, c = lines(before, after)
    assert "one answer" not in every + c
    assert "of 4 held-out tasks, where one answer to all scores 50.0%; gain" in a and "one answer to all scores 100.0%" in b
    alone = Grades((1.0, 0.0), ("a", "a"), (1.0, 1.0), (0.0, 0.0), {"a": 0.5})
    assert all("one answer to all scores 50.0%" in line for line in lines(alone, alone)), "all of one domain"
    records = [json.loads(json.dumps({"step": step, **vars(grades)})) for step, grades in enumerate((before, after))]
    assert grades_of(records[1]) == after
    assert exam.cut(before) == ", 50% of them cut at exam.max_new_tokens=32" and not exam.cut(after)
    dotted = [line for line in picture(records).axes[0].get_lines() if line.get_linestyle() == ":"]
    assert [line.get_ydata()[0] for line in dotted] == [0.5, 1.0]  # type: ignore[index]
