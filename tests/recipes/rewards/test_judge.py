"""Rewards: what is right scores, what misbehaves scores zero and is counted, and the next one is judged all the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from data.tasks import Task, Tasks, TasksConfig
from recipes.errors import UserError
from recipes.rewards.config import RewardsConfig
from recipes.rewards.judge import Completion, Judge, code_of

PLUG_IN = """
import os, random, time

def reward(task, response):
    if response == "hang":
        while True: pass
    if response == "crash":
        os.kill(os.getpid(), 11)
    if response == "exit":
        raise SystemExit(0)
    if response == "garbage":
        return "good"
    if response == "nan":
        return float("nan")
    if response == "huge":
        return 2.0
    if response == "memory":
        bytearray(10 << 30)
    if response == "raise":
        raise ValueError("no")
    if response == "network":
        import socket
        try:
            socket.create_connection(("127.0.0.1", 80))
        except OSError:
            pass
        return 1.0
    if response == "random":
        return random.random()
    return float(response == task["answer"]) / 2
"""


def task(answer: str = "4", **metadata: object) -> Task:
    return Task("t:1", "2 + 2?", answer, "sums", metadata)


@pytest.fixture(scope="module")
def plug_in(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("rewards") / "mine.py"
    file.write_text(PLUG_IN)
    return f"{file}:reward"


@pytest.fixture(scope="module")
def judge(plug_in: str) -> Iterator[Judge]:
    with Judge(RewardsConfig(names=[plug_in], seconds=3, workers=2)) as it:
        yield it


def test_exact_and_format_need_no_process() -> None:
    with Judge(RewardsConfig(names=["exact", "format"])) as judge:
        batch = [(task(), Completion("..", r)) for r in ("4", " 4.\n", "5", "", None)]
        assert [v.score for v in judge.score(batch)] == [1.1, 1.1, 0.1, 0.1, 0.0]
        assert judge.score([(task(), "4")])[0].parts == {"exact": 1.0, "format": 1.0}
        assert not judge._served and not judge.problems and judge.judged == 6


def test_a_plug_in_scores(judge: Judge) -> None:
    assert [v.score for v in judge.score([(task(str(n)), "3") for n in range(6)])] == [0, 0, 0, 0.5, 0, 0]


@pytest.mark.parametrize(
    "response, kind",
    [
        ("hang", "timeout"),
        ("crash", "crash"),
        ("exit", "crash"),
        ("garbage", "garbage"),
        ("nan", "garbage"),
        ("huge", "garbage"),
        ("memory", "memory"),
        ("raise", "crash"),
        ("network", "network"),
    ],
)
def test_a_misbehaving_plug_in_scores_zero_is_counted_and_starts_again(judge: Judge, response: str, kind: str) -> None:
    before = judge.problems[kind]
    bad, good = judge.score([(task(), response), (task(), "4")])
    assert (bad.score, bad.problems) == (0.0, (kind,)) and bad.detail
    assert (good.score, good.problems) == (0.5, ())
    assert judge.problems[kind] == before + 1
    assert judge.score([(task(), "4")] * 3)[2].score == 0.5


def test_every_reward_that_fails_is_counted_and_told_once(plug_in: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "other.py").write_text("def good(task, response): return 1.0\ndef bad(task, response): raise KeyError('it')\n")
    good, bad = f"{tmp_path / 'other.py'}:good", f"{tmp_path / 'other.py'}:bad"
    with Judge(RewardsConfig(names=[plug_in, good, bad], weights=[1.0, 0.5, 1.0], seconds=3)) as judge:
        first, second, third = judge.score([(task(), response) for response in ("nan", "raise", "4")])
        assert first.problems == ("garbage", "crash") and first.score == 0.5
        assert second.problems == ("crash", "crash") and third.problems == ("crash",) and third.score == 1.0
        assert judge.problems == {"garbage": 1, "crash": 4}
        judge.score([(task(), "nan")])
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3 and sum("KeyError: 'it'" in line for line in told) == 1
    assert all(
        line.startswith(f"reward {name} of task t:1: ") for line, name in zip(sorted(told), sorted([plug_in, plug_in, bad]))
    )


def test_a_function_that_does_not_take_a_task_and_a_response_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("def reward(task): return 1.0\n")
    with (
        Judge(RewardsConfig(names=[f"{tmp_path / 'one.py'}:reward"])) as judge,
        pytest.raises(
            UserError, match=r"one\.py:reward: cannot be loaded in the sandbox: crash: .*too many positional arguments"
        ),
    ):
        judge.score([(task(), "4")])


def test_scores_depend_neither_on_workers_nor_on_the_call(judge: Judge, plug_in: str) -> None:
    batch = [(Task(f"t:{i}", "", "", "", {}), "random") for i in range(6)]
    first = [v.score for v in judge.score(batch)]
    with Judge(RewardsConfig(names=[plug_in])) as other:
        assert [v.score for v in other.score(batch)] == first and len(set(first)) == 6


def test_unit_tests() -> None:
    tests = "assert f(2) == 4\nassert f(3) == 9\ndef test_negative():\n    assert f(-1) == 1\n"
    good, half = "Here:\n```python\ndef f(x): return x * x\n```\n", "def f(x): return 4 if x == 2 else x * x"
    wrong = "def f(x): return 2 * x"
    forged = ["raise SystemExit(0)", "import os; os._exit(0)", "print('passed')", "def f(x:", "import os; os.write(3, b'x')"]
    given = task(reward="tests", tests=tests)
    with Judge(RewardsConfig(workers=2, seconds=30), {"tests"}) as judge:
        verdicts = judge.score([(given, text) for text in (good, half, wrong, *forged)])
        assert [v.score for v in verdicts] == [1, 1, 0, *[0] * len(forged)]
        assert not verdicts[2].problems and "AssertionError" in verdicts[2].detail
        assert verdicts[0].parts == {"tests": 1.0}
    with Judge(RewardsConfig(partial_tests=True, seconds=30), {"tests"}) as judge:
        assert judge.score([(given, wrong)])[0].score == pytest.approx(1 / 3)


@pytest.mark.slow
def test_reasoning_gyms_own_rule() -> None:
    tasks = Tasks(TasksConfig(generators=["complex_arithmetic"]))
    assert tasks.rewards() == {"own"}
    one = tasks.train(0)
    with Judge(RewardsConfig(seconds=60), tasks.rewards()) as judge:
        spaced = one.answer.replace(" ", "")
        assert [v.score for v in judge.score([(one, one.answer), (one, spaced), (one, "12345")])] == [1, 1, 0]


def test_math_verify() -> None:
    half = task(r"\frac{1}{2}")
    with Judge(RewardsConfig(names=["math"], seconds=60)) as judge:
        verdicts = judge.score([(half, "$0.5$"), (half, r"so it is $\frac{2}{4}$"), (half, "$3$"), (half, "")])
        assert [v.score for v in verdicts] == [1, 1, 0, 0]


def test_a_module_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "myrewards"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "deep.py").write_text("from myrewards import helper\ndef f(task, response): return helper.ONE\n")
    (package / "helper.py").write_text("ONE = 1")
    (tmp_path / "secret.txt").write_text("key")
    monkeypatch.syspath_prepend(str(tmp_path))
    with Judge(RewardsConfig(names=["myrewards.deep:f"], seconds=30)) as judge:
        assert judge.score([(task(), "x")])[0].score == 1.0


@pytest.mark.parametrize(
    "given, message",
    [
        ({"names": ["exactly"]}, "rewards.names=exactly: no such reward; the nearest is exact"),
        ({"names": ["/no/file.py:f"]}, "no such file"),
        ({"names": [f"{__file__}:nothing"]}, "has no function nothing"),
        ({"names": ["no_such_module:f"]}, "no module no_such_module is found"),
        ({"names": ["exact"], "weights": [1.0, 2.0]}, "give 1, one for each"),
        ({"names": []}, "give at least one"),
        ({"names": ["exact", "exact"]}, "given twice"),
        ({"workers": 0}, "rewards.workers=0"),
    ],
)
def test_mistakes_are_named(given: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as error:
        Judge(RewardsConfig(**given))  # type: ignore[arg-type]
    assert message in str(error.value)


def test_refused_where_there_is_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.sandbox.host.available", lambda: ["user namespaces"])
    with pytest.raises(UserError, match=r"rewards.names=tests: runs foreign code.*user namespaces"):
        Judge(RewardsConfig(), {"tests"})
    Judge(RewardsConfig(names=["exact", "format"])).close()


def test_code_is_the_last_block() -> None:
    assert code_of("a\n```py\nx\n```\nb\n```\ny\n```") == "y\n" and code_of("z = 1") == "z = 1" and code_of("```python\nw") == "w"
