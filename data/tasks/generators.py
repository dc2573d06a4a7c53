"""Tasks from reasoning-gym's generators. The library is imported at first use: it takes seconds."""

from __future__ import annotations

import difflib
import importlib.util
import json
import warnings
from dataclasses import fields
from enum import Enum
from functools import cache
from typing import Any, get_args, get_type_hints

from data.errors import DataError
from data.tasks.presets import PRESETS
from data.tasks.task import Task

_INDICES = 1 << 31  # a generator's instances that tasks are drawn from


class Generator:
    """One generator with its parameters. Instance `index` is a pure function of name, parameters and index."""

    def __init__(self, name: str, parameters: dict[str, Any]):
        """parameters: those that differ from reasoning-gym's own. Raises DataError for a name, parameter or value it refuses."""
        self.name, self.parameters = name, parameters
        self._dataset = _dataset(name, json.dumps(parameters, sort_keys=True))
        self.own_score = "score_answer" in type(self._dataset).__dict__
        self.task(0)  # some have no single answer

    def task(self, index: int) -> Task:
        try:
            item = self._dataset[index % _INDICES]
        except Exception as error:
            raise DataError(f"tasks.generators={self.name}: instance {index} failed: {error}; {_ADVICE}") from error
        question, answer = item["question"], item["answer"]
        if not isinstance(question, str) or not isinstance(answer, str) or not answer.strip():
            raise DataError(f"tasks.generators={self.name}: instance {index} has no single answer in words; {_ADVICE}")
        metadata = {"generator": self.name, "parameters": self.parameters, "index": index, "own_score": self.own_score}
        return Task(f"{self.name}:{index}", question.strip(), answer.strip(), self.name, metadata)


_ADVICE = "use another generator or other tasks.parameters"


def own_score(task: Task, answer: str) -> float:
    """reasoning-gym's own judgement (0..1) of an answer to a task. May raise or hang: it parses what a model wrote."""
    given = task.metadata
    dataset = _dataset(given["generator"], json.dumps(given["parameters"], sort_keys=True))
    return float(dataset.score_answer(answer, dataset[given["index"]]))


def parameters(name: str, preset: str | None, given: dict[str, Any]) -> dict[str, Any]:
    """What the preset and then the user set for a generator."""
    return {**(PRESETS[preset].get(name, {}) if preset else {}), **given}


def names() -> list[str]:
    """Every generator of the installed reasoning-gym. Raises DataError where it is not installed."""
    return sorted(_library().DATASETS)


@cache
def _library() -> Any:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise DataError('tasks.generators: reasoning-gym is not installed; EXTRAS="test rl" make install, or give tasks.folder')
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its sources hold invalid escapes
        from reasoning_gym import factory
    return factory


@cache
def _dataset(name: str, parameters: str) -> Any:
    known = _library().DATASETS
    if name not in known:
        raise DataError(f"tasks.generators={name}: no such generator of reasoning-gym{_nearest(name, known)}")
    allowed = [f.name for f in fields(known[name][1]) if f.name not in ("seed", "size")]
    chosen = json.loads(parameters)
    for key in chosen:
        if key not in allowed:
            raise DataError(
                f"tasks.parameters.{name}.{key}: no such parameter{_nearest(key, allowed)}; there are {', '.join(allowed)}"
            )
    try:
        return _library().create_dataset(name, seed=0, **_typed(known[name][1], chosen))
    except Exception as error:  # its checks are assertions, its defects anything
        shown = ", ".join(f"tasks.parameters.{name}.{key}={value}" for key, value in chosen.items())
        raise DataError(
            f"{shown or f'tasks.generators={name}'}: reasoning-gym refuses: {error or type(error).__name__}"
        ) from error


def _typed(config: type, chosen: dict[str, Any]) -> dict[str, Any]:
    """The parameters with words in place of members of an enumeration made such members. Raises ValueError for no such member."""
    hints = get_type_hints(config)

    def typed(hint: Any, value: Any) -> Any:
        if isinstance(value, list) and get_args(hint):
            return [typed(get_args(hint)[0], one) for one in value]
        if not (isinstance(hint, type) and issubclass(hint, Enum)):
            return value
        if value not in (known := [member.value for member in hint]):
            raise ValueError(f"{value} is none of {', '.join(map(str, known))}")
        return hint(value)

    return {key: typed(hints[key], value) for key, value in chosen.items()}


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; the nearest is {close[0]}" if close else ""
