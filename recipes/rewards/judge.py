"""Scores of completions, in batches. What crashes, hangs or returns garbage scores zero and is counted; training goes on.

judge = Judge(cfg.rewards, tasks.rewards())
verdicts = judge.score([(task, Completion(text, response)), ...])
judge.problems  # Counter by kind
"""

from __future__ import annotations

import importlib.util
import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data.tasks.task import Task, normalised
from recipes.errors import UserError
from recipes.rewards.config import RewardsConfig, check_name, is_plug_in, validate, weights
from recipes.sandbox import host

log = logging.getLogger(__name__)

_ROOT = Path(__file__).parents[2]
_HERE = Path(__file__).parent
_PACKAGES = ("recipes", "data", "parallel", "kernels")
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
OWN = "own"  # reasoning-gym's rule for a generator, asked where the answer is not the expected one to the letter


@dataclass(frozen=True)
class Completion:
    """text: all that was generated. response: its answer, as the chat template's parser found it; None where that refused it."""

    text: str
    response: str | None


@dataclass(frozen=True)
class Verdict:
    """`score` is the weighted sum; `parts` each reward's own, 0..1. `problems` (of KINDS) say why parts are zero that are no
    verdict on the answer: one for each such part.
    """

    score: float
    problems: tuple[str, ...] = ()
    detail: str = ""
    parts: dict[str, float] = field(default_factory=dict)


KINDS = (*host.PROBLEMS, "garbage", "sandbox")


@dataclass(frozen=True)
class _Part:
    score: float
    problem: str | None = None
    detail: str = ""


class Judge:
    """A context manager; `close` ends its processes. Not for several threads at once."""

    def __init__(self, cfg: RewardsConfig, rewards: Iterable[str] = ()):
        """rewards: what the tasks ask for beside `cfg.names`, from `Tasks.rewards()`.

        Raises UserError for a reward that does not exist, and for one that needs a sandbox where there is none.
        """
        validate(cfg)
        self._cfg = cfg
        self._limits = host.Limits(cfg.seconds, cfg.memory_mb, cfg.disk_mb, cfg.processes)
        self._served: dict[str, list[host.Served]] = {}
        self._pool = ThreadPoolExecutor(cfg.workers, thread_name_prefix="judge")
        self.problems: Counter[str] = Counter()
        self.judged = 0
        self._told: set[tuple[str, str]] = set()  # (reward, kind of problem) that was logged
        for name in dict.fromkeys([*cfg.names, *rewards]):
            if name != OWN:
                check_name(name)
            _check_there(name)
        if names := [n for n in dict.fromkeys([*cfg.names, *rewards]) if needs_sandbox(n)]:
            if missing := host.available():
                raise UserError(
                    f"rewards.names={names[0]}: runs foreign code, in a sandbox that lacks here: {'; '.join(missing)}"
                )

    def score(self, batch: Sequence[tuple[Task, Completion | str]]) -> list[Verdict]:
        """One verdict each, in order; a plain text is its own response. Deterministic, whatever `rewards.workers`."""
        given = [(task, c if isinstance(c, Completion) else Completion(c, c)) for task, c in batch]
        found: list[dict[str, _Part]] = [{} for _ in given]
        jobs: dict[str, list[tuple[int, str]]] = {}  # reward -> (place in the batch, name that it goes by)
        for place, (task, completion) in enumerate(given):
            for name in self._names(task):
                part = _at_once(name, task, completion)
                if part is not None:
                    found[place][name] = part
                else:
                    jobs.setdefault(OWN if name == "exact" else name, []).append((place, name))
        for reward, places in jobs.items():
            parts = self._sandboxed(reward, [given[place] for place, _ in places])
            for (place, name), part in zip(places, parts):
                found[place][name] = part
        return [self._verdict(task, parts) for (task, _), parts in zip(given, found)]

    def _names(self, task: Task) -> list[str]:
        own = task.metadata.get("reward")
        return list(dict.fromkeys([own or self._cfg.names[0], *self._cfg.names[1:]]))

    def _verdict(self, task: Task, parts: dict[str, _Part]) -> Verdict:
        self.judged += 1
        values = {name: parts[name].score for name in self._names(task)}
        problems = tuple(part.problem for part in parts.values() if part.problem)
        bad = next((part for part in parts.values() if part.problem), None)
        for name, part in parts.items():
            if part.problem:
                if (name, part.problem) not in self._told:
                    self._told.add((name, part.problem))
                    log.warning(
                        "reward %s of task %s: %s: %s; such score zero and are counted", name, task.id, part.problem, part.detail
                    )
                self.problems[part.problem] += 1
        score = sum(weight * value for weight, value in zip(weights(self._cfg), values.values()))
        detail = bad.detail if bad else next((part.detail for part in parts.values() if part.detail), "")
        return Verdict(score, problems, detail, values)

    def _sandboxed(self, reward: str, items: list[tuple[Task, Completion]]) -> list[_Part]:
        count = min(self._cfg.workers, len(items))
        if reward == "tests":
            return list(self._pool.map(lambda item: self._tests(*item), items))
        if reward not in self._served:
            self._served[reward] = [self._loaded(reward)]
        served = self._served[reward]
        while len(served) < count:
            served.append(self._serve(reward))
            served[-1].start()
        shares = list(self._pool.map(lambda n: [self._ask(served[n], *item) for item in items[n::count]], range(count)))
        return [shares[i % count][i // count] for i in range(len(items))]

    def _loaded(self, reward: str) -> host.Served:
        """The first of its workers. What cannot even be loaded judges nothing: no training goes on with zeros for that."""
        served = self._serve(reward)
        try:
            failed = served.load()
        except host.Broken as error:
            raise UserError(f"rewards: {reward}: its sandbox does not start: {error}") from error
        if failed is not None:
            raise UserError(
                f"rewards: {reward}: cannot be loaded in the sandbox: {failed.problem}: {failed.detail}; mend it, or raise "
                f"rewards.memory_mb={self._cfg.memory_mb}"
            )
        return served

    def _serve(self, reward: str) -> host.Served:
        packages = [str(_ROOT / package) for package in _PACKAGES]
        paths, search, setup = packages, [str(_ROOT)], reward
        if is_plug_in(reward):
            place, _, function = reward.rpartition(":")
            if place.endswith(".py"):
                file = str(Path(place).expanduser().resolve())
                paths, setup = [*packages, file], f"{file}:{function}"
            else:
                origin = _module_place(place)
                paths, search = [*packages, str(origin)], [str(_ROOT), str(origin.parent)]
        entry = "plug_in" if is_plug_in(reward) else {OWN: "own_score", "math": "math"}[reward]
        return host.Served(f"recipes.rewards.served:{entry}", self._limits, paths=paths, search=search, setup=setup)

    def _ask(self, served: host.Served, task: Task, completion: Completion) -> _Part:
        try:
            outcome = served.call({"task": asdict(task), "response": completion.response})
        except host.Broken as error:
            return _Part(0.0, "sandbox", str(error))
        return _part(outcome)

    def _tests(self, task: Task, completion: Completion) -> _Part:
        if "tests" not in task.metadata:
            return _Part(0.0, "garbage", f"task {task.id} has no tests")
        request = {"code": code_of(completion.response or ""), "tests": task.metadata["tests"]}
        try:
            outcome = host.run(f"{_HERE / 'run_tests.py'}:run", request, self._limits)
        except host.Broken as error:
            return _Part(0.0, "sandbox", str(error))
        if outcome.problem:
            return _Part(0.0, outcome.problem, outcome.detail)
        passed, tests, why = (outcome.value[key] for key in ("passed", "tests", "why"))
        if not tests:
            return _Part(0.0, "garbage", f"the tests of task {task.id} hold no assert and no function test_*")
        return _Part(passed / tests if self._cfg.partial_tests else float(passed == tests), None, why)

    def close(self) -> None:
        for served in (one for some in self._served.values() for one in some):
            served.close()
        self._served.clear()
        self._pool.shutdown()

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def needs_sandbox(reward: str) -> bool:
    return reward in ("math", "tests", OWN) or is_plug_in(reward)


def code_of(response: str) -> str:
    """The last fenced block of a response, or all of it where none is fenced."""
    blocks = _FENCE.findall(response)
    return blocks[-1] if blocks else response


def _at_once(name: str, task: Task, completion: Completion) -> _Part | None:
    """What needs no foreign code; None: the sandbox must say."""
    if name == "format":
        return _Part(float(completion.response is not None))
    if completion.response is None:
        return _Part(0.0)
    if name == "exact":
        if normalised(completion.response) == normalised(task.answer):
            return _Part(1.0)
        return None if task.metadata.get("own_score") and completion.response.strip() else _Part(0.0)
    return None


def _part(outcome: host.Outcome) -> _Part:
    if outcome.problem:
        return _Part(0.0, outcome.problem, outcome.detail)
    value: Any = outcome.value
    if isinstance(value, bool):
        value = float(value)
    if not isinstance(value, int | float) or not math.isfinite(value) or not 0 <= value <= 1:
        return _Part(0.0, "garbage", f"returned {value!r:.100}; a score is a number in 0..1")
    return _Part(float(value))


def _check_there(name: str) -> None:
    """Raises UserError for a reward whose code or library is not here."""
    if name == "math" and importlib.util.find_spec("math_verify") is None:
        raise UserError('rewards.names=math: math-verify is not installed; EXTRAS="test rl" make install, or use exact')
    place, _, function = name.rpartition(":")
    if not is_plug_in(name):
        return
    if place.endswith(".py"):
        if not Path(place).expanduser().is_file():
            raise UserError(f"rewards.names={name}: {place}: no such file")
        if not re.search(
            rf"^(?:def\s+{function}\b|{function}\s*[=:]|from\s.*\b{function}\b)", Path(place).expanduser().read_text(), re.M
        ):
            raise UserError(f"rewards.names={name}: {place} has no function {function}")
    else:
        _module_place(place)


def _module_place(module: str) -> Path:
    """The folder or file of a module's top-level package. It is found, not imported."""
    top = module.split(".")[0]
    spec = importlib.util.find_spec(top)
    if spec is None or not (spec.submodule_search_locations or spec.origin):
        raise UserError(f"rewards.names={module}: no module {top} is found from here; give file.py:function, or set PYTHONPATH")
    folders = list(spec.submodule_search_locations or ())
    return Path(folders[0] if folders else str(spec.origin)).resolve()
