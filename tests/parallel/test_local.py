"""Ranks forked on this machine: what they see, what comes back, and that nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from parallel.local import Helper, RankError

HERE = "tests.parallel.rank_targets"


@pytest.fixture(scope="module")
def helper() -> Iterator[Helper]:
    with Helper() as running:
        yield running


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where helpers started in this test keep their results."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_ranks_are_numbered_single_threaded_and_connected(helper: Helper) -> None:
    assert helper.run_ranks(f"{HERE}:place", 2) == [(0, 2, 1, "002", "11"), (1, 2, 1, "112", "11")]
    assert helper.run_ranks(f"{HERE}:place", 1) == [(0, 1, 1, "001", "11")]


def test_arguments_and_results_travel(helper: Helper) -> None:
    results = helper.run_ranks(f"{HERE}:total", 4, torch.ones(3, dtype=torch.float64))
    assert len(results) == 4 and all(torch.equal(r, torch.full((3,), 6.0, dtype=torch.float64)) for r in results)


def test_the_rank_that_failed_first_is_named_and_the_others_are_stopped(helper: Helper) -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 3 failed\n(.*\n)*.*in fails\n(.*\n)*ValueError: no luck on 1") as caught:
        helper.run_ranks(f"{HERE}:fails", 3, 1)
    assert caught.value.rank == 1 and time.monotonic() - began < 20
    assert not ranks_of(helper)


def test_a_rank_that_dies_is_named(helper: Helper) -> None:
    with pytest.raises(RankError, match=r"rank 2 of 3 died \(signal SIGKILL") as caught:
        helper.run_ranks(f"{HERE}:dies", 3, 2)
    assert caught.value.rank == 2 and not ranks_of(helper)


def test_a_hang_ends_and_says_where(helper: Helper) -> None:
    with pytest.raises(RankError, match="rank 0, 1 of 2 did not finish within 2 s") as caught:
        helper.run_ranks(f"{HERE}:hangs", 2, 0, timeout=2)
    first, second = str(caught.value).split("rank 1: ")
    assert "in waits_for_ever" in first and "in hangs" in first and "in barrier" in second
    assert not ranks_of(helper)


def test_what_cannot_be_found_is_named(helper: Helper) -> None:
    with pytest.raises(RankError, match=r"parallel\.nowhere:f: cannot be imported"):
        helper.run_ranks("parallel.nowhere:f", 1)


def test_a_module_that_starts_threads_is_refused(helper: Helper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "starts_threads.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\ndef f(): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with Helper() as other, pytest.raises(RankError, match="started 1 more threads"):
        other.run_ranks("starts_threads:f", 1)


def test_close_leaves_nothing(folders: Path) -> None:
    with Helper() as helper:
        helper.run_ranks(f"{HERE}:place", 1)
        assert list(folders.iterdir())
        pid = process_of(helper)
    assert not psutil.pid_exists(pid) and not list(folders.iterdir())


def test_a_helper_that_dies_is_reported_and_its_ranks_end(folders: Path) -> None:
    program = (
        "from parallel.local import *\n"
        "with Helper() as helper:\n"
        f"    try: helper.run_ranks('{HERE}:hangs', 2, 0)\n"
        "    except RankError as error: print(error)\n"
    )
    caller, ranks = started(program, folders)
    os.kill(psutil.Process(ranks[0]).ppid(), signal.SIGKILL)
    out, _ = caller.communicate(timeout=60)
    assert "the process that ranks are forked from has died" in out and caller.returncode == 0
    assert gone(ranks) and not list(folders.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_a_caller_that_ends_leaves_nothing(number: signal.Signals, folders: Path) -> None:
    program = f"from parallel.local import *\nwith Helper() as helper: helper.run_ranks('{HERE}:hangs', 2, 0)"
    caller, ranks = started(program, folders)
    helper = psutil.Process(ranks[0]).ppid()
    caller.send_signal(number)
    _, error = caller.communicate(timeout=60)
    assert ("KeyboardInterrupt" in error) == (number is signal.SIGINT)
    assert gone([*ranks, helper])
    limit = time.monotonic() + 60
    while list(folders.iterdir()) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not list(folders.iterdir())


def started(program: str, folders: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A process that runs `program`, and the two ranks that wait for ever in it."""
    root = Path(__file__).parents[2]
    # a test run in the background of a script ignores SIGINT, and so would its children
    program = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n{program}"
    environment = {**os.environ, "TMPDIR": str(folders), "PYTHONPATH": str(root)}
    caller = subprocess.Popen(
        [sys.executable, "-c", program], env=environment, cwd=root, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    limit = time.monotonic() + 90
    while time.monotonic() < limit:
        children = psutil.Process(caller.pid).children()
        ranks = [p.pid for p in children[0].children()] if children else []
        if len(ranks) == 2 and len(list(folders.glob("*/*.stack"))) == 2:
            return caller, ranks
        time.sleep(0.1)
    caller.kill()
    raise AssertionError(f"the ranks did not start: {caller.communicate()}")


def gone(pids: list[int]) -> bool:
    """whether all processes end within a minute; one that the system has yet to collect has ended."""
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
            return True
        time.sleep(0.05)
    return False


def process_of(helper: Helper) -> int:
    assert helper._process is not None
    return helper._process.pid


def ranks_of(helper: Helper) -> list[psutil.Process]:
    return psutil.Process(process_of(helper)).children()
