"""Inside the sandbox: rewards that stay loaded between calls. A request is {"task": {...}, "response": text}."""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Callable
from typing import Any

Reward = Callable[[dict[str, Any]], Any]


def plug_in(name: str) -> Reward:
    """The user's `function(task: dict, response: str) -> float`."""
    from recipes.sandbox.guest import load

    function: Callable[..., Any] = load(name)
    with contextlib.suppress(ValueError):  # some builtins do not tell what they take
        inspect.signature(function).bind({}, "")

    def call(request: dict[str, Any]) -> Any:
        random.seed(request["task"]["id"])
        value = function(request["task"], request["response"])
        return value.item() if hasattr(value, "item") else value  # numpy's numbers

    return call


def own_score(_: str) -> Reward:
    """reasoning-gym's own rule for a generator; 1 only where that is 1."""
    from data.tasks.generators import _library, own_score
    from data.tasks.task import Task

    _library()

    def call(request: dict[str, Any]) -> float:
        return float(own_score(Task(**request["task"]), request["response"]) >= 1.0)

    return call


def math(_: str) -> Reward:
    """Whether math-verify finds the response equal to the answer."""
    from math_verify import parse, verify

    def call(request: dict[str, Any]) -> float:
        gold = parse(request["task"]["answer"]) or parse(f"${request['task']['answer']}$")
        return float(bool(verify(gold, parse(request["response"]))))

    return call
