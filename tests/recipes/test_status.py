"""`k3 status`, from run folders alone and with what a queue would say; with a real one in tests/cluster."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from recipes import cli
from recipes.compose import compose, resolved_yaml
from recipes.run_folder import open_run
from recipes.status import of, tail
from slurm.client import Queued


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run at step 2 of 9."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs/r"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints/latest").write_text("step_2\n")
    (folder / "config.yaml").write_text(resolved_yaml(compose(["model=tiny", "run.steps=9", f"run.dir={folder}"])))
    lines = [json.dumps({"step": n, "loss": 5.0 / n, "tokens_per_second": 1000.0 * n}) + "\n" for n in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(lines) + '{"step": 3, "lo')
    return folder


def submitted(folder: Path) -> Path:
    log = folder / "job-7.log"
    log.write_text("k3: one\nstep 1\rstep 2\nk3: training failed: exit code 3\nsrun: error: n1: task 0: Exited\n\n")
    facts = {"job": 7, "nodes": 2, "log": str(log), "resume": "k3 submit run.resume=runs/r nodes=2 cluster=cpu"}
    (folder / "job.json").write_text(json.dumps(facts))
    return folder


def test_a_stopped_run_without_slurm(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert cli.main(["status"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.split() == ["runs/r", "stopped", "step", "2/9", "loss", "2.5000", "2,000", "tokens/s", "no", "process"]
    assert second == "    continue with: k3 pretrain run.resume=runs/r"
    assert cli.main(["status", "runs/r"]) == 0 and capsys.readouterr().out.splitlines() == [first, second]


def test_a_run_that_this_machine_trains(folder: Path) -> None:
    (folder / "checkpoints/latest").unlink()
    opened = open_run(compose([f"run.dir={folder}", "run.resume=auto"]))
    try:
        found = of(folder, None)
    finally:
        opened.close()
    assert (found.state, found.where, found.advice) == ("running", f"process {os.getpid()}", ())
    assert of(folder, None).state == "stopped"


@pytest.mark.parametrize(
    ("job", "state", "why"),
    [
        (Queued("RUNNING", "n[1-2]", "None"), "running", ""),
        (Queued("COMPLETING", "n[1-2]", "None"), "running", "completing"),
        (Queued("PENDING", "", "BeginTime"), "requeued", "BeginTime"),
        (Queued("FAILED", "n1", "NonZeroExitCode"), "failed", "failed"),
        (Queued("TIMEOUT", "n1", "TimeLimit"), "failed", "timeout"),
        (Queued("CANCELLED", "n1", "None"), "stopped", "cancelled"),
        (None, "stopped", ""),
    ],
)
def test_what_the_queue_says(folder: Path, job: Queued | None, state: str, why: str) -> None:
    found = of(submitted(folder), {} if job is None else {7: job})
    assert (found.state, found.why) == (state, why) and found.where.startswith("job 7")
    if state in ("failed", "stopped"):
        log, again = found.advice
        assert log.startswith("its log ends: k3: training failed: exit code 3   (") and again.endswith("nodes=2 cluster=cpu")
    else:
        assert found.advice == ()


def test_a_run_that_has_not_begun_waits(folder: Path) -> None:
    (folder / "metrics.jsonl").unlink()
    assert of(submitted(folder), {7: Queued("PENDING", "", "Priority")}).state == "pending"


def test_without_a_queue_the_files_tell_a_failure(folder: Path) -> None:
    assert of(submitted(folder), None).state == "unknown"
    (folder / "job.exit").write_text("6 1\n")  # of an earlier job
    assert of(folder, None).state == "unknown"
    (folder / "job.exit").write_text("7 3\n")
    assert (of(folder, None).state, of(folder, None).why) == ("failed", "exit code 3")
    (folder / "summary.json").touch()
    assert of(folder, None).state == "done"


def test_folders_that_hold_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", str(tmp_path)]) == 0 and "no runs" in capsys.readouterr().out
    assert cli.main(["status", str(tmp_path / "none")]) == 2 and "no such folder" in capsys.readouterr().err
    assert cli.main(["status", "x=1"]) == 2


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"x" * 3_000_000 + b"\nend\n")
    assert len(tail(tmp_path / "log")) == 2**20 and tail(tmp_path / "log").endswith("\nend\n")
