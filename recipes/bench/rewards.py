"""`k3 bench rewards`: scores a second of each kind of reward, and what a sandbox costs to make."""

from __future__ import annotations

import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from data.tasks.task import Task
from recipes.console import say
from recipes.rewards.config import RewardsConfig
from recipes.rewards.judge import Judge
from recipes.sandbox import host

_PLUG_IN = (
    "def nothing(request):\n    return request\n\n\ndef reward(task, response):\n    return float(response == task['answer'])\n"
)
_TESTS = "assert f(2) == 4\nassert f(3) == 9\n"
_CODE = "def f(x):\n    return x * x\n"


def run() -> None:
    say(f"load {psutil.getloadavg()[0]:.1f}")
    if missing := host.available():
        say(f"no sandbox here: {'; '.join(missing)}")
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "mine.py")
        file.write_text(_PLUG_IN)
        before = _processor()
        starts = sorted(_seconds(lambda: host.run(f"{file}:nothing", None, host.Limits())) for _ in range(20))
        used = (_processor() - before) / 20
        took = f"{statistics.median(starts) * 1e3:8.0f} ms (least {starts[0] * 1e3:.0f}; processor time {used * 1e3:.0f})"
        say(f"a sandbox, made and gone    {took}")
        task = Task("t:1", "2 + 2?", "4", "sums", {})
        tested = Task("t:2", "", "", "code", {"reward": "tests", "tests": _TESTS})
        _rate("exact, in this process", RewardsConfig(), task, "4", 20000)
        _rate("a plug-in, kept", RewardsConfig(names=[f"{file}:reward"]), task, "4", 2000)
        _rate("unit tests, a process each", RewardsConfig(), tested, _CODE, 30)
        _rate("... with two workers", RewardsConfig(workers=2), tested, _CODE, 30)


def _rate(label: str, cfg: RewardsConfig, task: Task, response: str, count: int) -> None:
    with Judge(cfg, {task.metadata.get("reward", "exact")}) as judge:
        assert judge.score([(task, response)])[0].score == 1.0
        seconds = _seconds(lambda: judge.score([(task, response)] * count))
    say(f"{label:<28}{count / seconds:8.0f} scores/s")


def _processor() -> float:
    """Seconds that ended children have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
