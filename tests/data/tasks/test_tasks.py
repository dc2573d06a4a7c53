"""Training and held-out tasks: pure functions of a number, never the same prompt on both sides."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from data.errors import DataError
from data.tasks import Task, Tasks, TasksConfig, occurs, survey
from data.tasks.generators import Generator, own_score
from data.tasks.presets import SMALL
from data.tasks.task import normalised, place


def words(task: Task) -> str:
    return " ".join(task.prompt.split())


def test_a_task_is_a_function_of_seed_and_number() -> None:
    a, b = Tasks(TasksConfig(seed=3)), Tasks(TasksConfig(seed=3))
    stream = a.stream(7)
    assert [next(stream) for _ in range(30)] == [b.train(i) for i in range(7, 37)]
    assert b.train(5) == b.train(5)
    assert [Tasks(TasksConfig(seed=4)).train(i) for i in range(6)] != [a.train(i) for i in range(6)]
    assert [a.train(i).domain for i in range(4)] == ["chain_sum", "gcd", "family_relationships", "chain_sum"]


def test_sides_share_no_prompt_even_where_there_are_few_and_whatever_the_seed() -> None:
    few = {"gcd": {"min_value": 2, "max_value": 12}}  # about 120 prompts
    held: dict[int, set[str]] = {}
    trained: set[str] = set()
    for seed in range(3):
        tasks = Tasks(TasksConfig(generators=["gcd"], parameters=few, seed=seed, heldout=1000))
        held[seed] = {words(task) for task in tasks.heldout()}
        trained |= {words(tasks.train(i)) for i in range(1500)}
    assert held[0] == held[1] == held[2]
    assert len(held[0]) > 5 and len(trained) > 80
    assert not held[0] & trained
    assert all(place(prompt) < 0.1 for prompt in held[0])


def test_heldout_set_has_its_size_distinct_prompts_and_all_sources() -> None:
    found = Tasks(TasksConfig(generators=["chain_sum", "gcd", "chain_sum", "count_bits"], heldout=90)).heldout()
    assert len(found) == len({words(task) for task in found}) == 90
    assert {d: sum(task.domain == d for task in found) for d in ("chain_sum", "gcd", "count_bits")} == dict.fromkeys(
        ("chain_sum", "gcd", "count_bits"), 30
    )


def test_another_process_with_another_hash_seed_makes_the_same_tasks() -> None:
    code = (
        "from data.tasks import *; from data.tasks.presets import SMALL\n"
        "t = Tasks(TasksConfig(generators=list(SMALL), heldout=20))\n"
        "text = repr([t.train(i) for i in range(100)] + t.heldout())\n"
    )
    here: dict[str, str] = {}
    exec(code, here)
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code + "print(text)"]
    there = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert there.strip() == here["text"]


def test_preset_answers_cannot_be_copied_or_guessed() -> None:
    for name, parameters in SMALL.items():
        generator = Generator(name, parameters)
        (found,) = survey(generator.task(i * 7919) for i in range(400))
        assert found.copied < 0.06 and found.guessed < 0.6, str(found)
        assert found.prompt_words[1] < 40 and found.answer_words <= 3, str(found)
        assert found.distinct > 200, str(found)


@pytest.mark.parametrize(
    "answer, prompt, expected",
    [
        ("12", "what is 12 + 3?", True),
        ("12", "what is 112 + 3?", False),
        ("2", "what is 1.2 + 3?", False),
        ("3", "of 4, 3.", True),
        ("Son", "is he the son of X", True),
        ("son", "a person", False),
    ],
)
def test_occurs(answer: str, prompt: str, expected: bool) -> None:
    assert occurs(answer, prompt) is expected


def test_normalised() -> None:
    assert normalised("  Yes.\n") == normalised("yes") != normalised("yes no")
    assert normalised("1.5") == "1.5"


def test_own_score_judges_equal_forms() -> None:
    task = Generator("complex_arithmetic", SMALL["complex_arithmetic"]).task(3)
    assert own_score(task, task.answer) == 1.0 and own_score(task, "no number") < 1.0


def test_words_stand_for_members_of_an_enumeration() -> None:
    """Which the command line cannot give."""
    one = Generator("aiw", {"task_types": ["siblings"], "task_type_weights": [1.0], "max_entities": 20})
    assert all("sisters" in one.task(i).prompt for i in range(20))


@pytest.mark.parametrize(
    "given, message",
    [
        (
            {"generators": ["chain_sums"]},
            "tasks.generators=chain_sums: no such generator of reasoning-gym; the nearest is chain_sum",
        ),
        (
            {"parameters": {"gcd": {"max_valeu": 3}}},
            "tasks.parameters.gcd.max_valeu: no such parameter; the nearest is max_value",
        ),
        ({"parameters": {"gcd": {"max_value": 0}}}, "reasoning-gym refuses: max_value must be > min_value"),
        ({"parameters": {"lcm": {"max_value": 9}}}, "tasks.parameters.lcm: not among tasks.generators"),
        (
            {"generators": ["aiw"], "parameters": {"aiw": {"task_types": ["sibling"]}}},
            "reasoning-gym refuses: sibling is none of siblings, friends, colleagues",
        ),
        ({"parameters": {"gcd": {"seed": 9}}}, "tasks.parameters.gcd.seed: is chosen for you"),
        ({"preset": "tiny"}, "tasks.preset=tiny: no such preset; there are small and null"),
        ({"generators": []}, "there is no tasks.folder either"),
        ({"heldout_fraction": 1.0}, "must lie between 0 and 1"),
        ({"folder": "/nowhere"}, "tasks.folder=/nowhere: no such file"),
    ],
)
def test_mistakes_are_named(given: dict[str, object], message: str) -> None:
    with pytest.raises(DataError) as error:
        Tasks(TasksConfig(**given))  # type: ignore[arg-type]
    assert message in str(error.value)
