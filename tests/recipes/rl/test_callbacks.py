"""What a step of RL says of itself: its reward, what was cut, and what could not be judged."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optim.optimizer import StepReport
from recipes.rl.callbacks import RolloutMetrics, failures
from recipes.trainer import StepResult


def _step(number: int, **metrics: float) -> tuple[StepResult, Any]:
    result = StepResult(number, [0.0], 1, 1, 1.0, StepReport(number, 1e-3, 1.0, 1.0, False))
    return result, {"rl/reward": 0.25, "rl/cut": 0.0, **metrics}


def test_failures_are_added_up_by_kind() -> None:
    records = [{"rl/problems/crash": 2, "rl/reward": 1.0}, {"rl/problems/crash": 1, "rl/problems/timeout": 4}, {"loss": 3.0}]
    assert failures(records) == "no verdict on 3 crash, 4 timeout"
    assert failures([{"rl/reward": 1.0}]) == ""


def test_a_step_tells_of_it_and_of_answers_that_are_all_cut_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rollouts: Any = SimpleNamespace(cfg=SimpleNamespace(max_new_tokens=12))
    callback, none = RolloutMetrics(rollouts, tmp_path, SimpleNamespace()), SimpleNamespace()  # type: ignore[arg-type]
    words, said = [], []
    for number, more in enumerate(({}, {"rl/cut": 0.5, "rl/problems/crash": 3}, {"rl/cut": 1.0}, {"rl/cut": 1.0})):
        result, rollouts.metrics = _step(number, **more)
        callback.step(none, result)  # type: ignore[arg-type]
        words.append(result.words)
        said.append(capsys.readouterr().out)
        assert rollouts.metrics.items() <= result.metrics.items()
    cut = "100% of the answers cut"
    half = ["reward 0.250", "50% of the answers cut", "no verdict on 3 crash"]
    assert words == [["reward 0.250"], half, ["reward 0.250", cut], ["reward 0.250", cut]]
    assert [bool(text) for text in said] == [False, False, True, False] and "cut at rl.max_new_tokens=12" in said[2]
