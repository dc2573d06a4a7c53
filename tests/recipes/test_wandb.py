"""The real W&B client: offline, online against a server on the loopback, and with servers that are of no use."""

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Container
from pathlib import Path
from types import SimpleNamespace

import pytest
import wandb

from optim import StepReport
from recipes.callbacks.alerts import Alerts
from recipes.callbacks.metrics import flat
from recipes.callbacks.wandb import Wandb, run_id
from recipes.config import WandbConfig, WandbMode
from recipes.dashboard import answers, has_key, wanted_mode
from recipes.trainer import StepResult
from tests.recipes.small_run import do, metrics, write_corpus

KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def no_configuration(monkeypatch, tmp_path):
    """Neither this machine's key nor its settings."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_RUN_ID", "WANDB_PROJECT", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    wandb.teardown()  # it reads the environment once a process
    yield
    wandb.teardown()


# one grey pixel
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010800000000"
    "3a7e9b550000000a49444154789c6360000000020001e221bc330000000049454e44ae426082"
)


def log(folder: Path, mode: WandbMode, steps: range, *, broken: bool = False, skipped: Container[int] = (), **dials) -> Wandb:
    """One process's part of a run, as the trainer calls it."""
    folder.mkdir(exist_ok=True)
    callback = Wandb(WandbConfig(mode=mode, **dials), folder, {"model": {"layers": 9}})
    trainer = SimpleNamespace(
        results={"summary": {"heldout_loss": 2.5, "dense": None}}, progress=SimpleNamespace(step=steps.stop - 1)
    )
    callback.start(trainer)
    with contextlib.suppress(ArithmeticError):
        train(callback, trainer, folder, steps, broken, skipped)
    return callback


def train(callback, trainer, folder: Path, steps: range, broken: bool, skipped: Container[int]) -> None:
    try:
        for step in steps:
            metrics = {"step": step, "loss": 5.0 / step, "max_logit": math.nan, "load/experts": {"a": [1, 2]}, "skipped": False}
            metrics["tokens"] = 128 * step
            report = StepReport(step, 1e-3, 1.0, 1.0, step in skipped, reason="spike" if step in skipped else None)
            callback.step(trainer, StepResult(step, [5.0], 128, 4, 0.1, report, metrics))
        if broken:
            raise ArithmeticError("it broke\nin the middle")
        callback.end(trainer)
        trainer.results |= {"sample": "def f"}
        (folder.parent / "a.png").write_bytes(PNG)
        trainer.results["pictures"] = {"residuals": folder.parent / "a.png"}
        callback.complete(trainer)
    finally:
        callback.close(trainer)


def records(part: Path) -> list[dict]:
    """An offline run's log, read by the client's own command."""
    program = [str(Path(sys.executable).parent / "wandb"), "leet", "inspect", "--json", str(part)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def logged(part: Path) -> SimpleNamespace:
    """What the client's own command does not print of an offline run's log: its frames are LevelDB's, of protobuf records."""
    from wandb.proto import wandb_internal_pb2 as pb

    wandb.teardown()  # its service writes the last of the log when it ends
    (file,) = part.glob("*.wandb")
    content, at, joined = file.read_bytes(), 7, b""
    out = SimpleNamespace(run=None, metrics=[], alerts=[], kinds={}, exit=None, history=[])
    while at + 7 <= len(content) and any(content[at : at + 7]):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        body = content[at + 7 : at + 7 + size]
        if len(body) < size:
            break  # torn by a kill
        at += 7 + size
        joined = body if kind in (1, 2) else joined + body
        if kind not in (1, 4):
            continue
        record = pb.Record.FromString(joined)
        if record.HasField("run"):
            out.run = record.run
        elif record.HasField("metric"):
            out.metrics.append(record.metric)
        elif record.HasField("alert"):
            out.alerts.append((record.alert.title, record.alert.text, record.alert.level))
        elif record.HasField("exit"):
            out.exit = record.exit.exit_code
        elif record.HasField("history"):
            out.history.append({item.nested_key[0]: json.loads(item.value_json) for item in record.history.item})
            for item in record.history.item:
                if item.nested_key[-1] == "_type":
                    out.kinds[item.nested_key[0]] = json.loads(item.value_json)
    return out


def test_offline_parts_make_one_series_of_one_run(tmp_path, capfd):
    """As over three requeues."""
    folder = tmp_path / "run"
    for steps in (range(1, 3), range(3, 4), range(4, 5), range(5, 6)):
        log(folder, WandbMode.offline, steps)
    said = capfd.readouterr()
    assert said.out.count("W&B: offline; send it with `wandb sync ") == 4 and said.err == ""
    parts = sorted(folder.glob("wandb/offline-run-*"))
    assert len(parts) == 4, "each process writes its own part"
    ids, steps = set(), []
    for part in parts:
        found = records(part)
        ids |= {r["run"]["run_id"] for r in found if r["type"] == "run"}
        history = [r["history"]["item"] for r in found if r["type"] == "history"]
        steps += [item["_step"] for item in history]
        assert all(item["loss"] == 5.0 / item["_step"] and "max_logit" not in item for item in history)
        assert not any("experts" in key for item in history for key in item)
    assert ids == {run_id(folder)} and sorted(steps) == [1, 2, 3, 4, 5]


def test_without_a_key_auto_is_offline(tmp_path, monkeypatch):
    assert wanted_mode(WandbMode.auto) is WandbMode.offline and not has_key()
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert wanted_mode(WandbMode.auto) is WandbMode.online
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wanted_mode(WandbMode.auto) is WandbMode.disabled
    assert wanted_mode(WandbMode.offline) is WandbMode.offline, "what the user types wins over the environment"


def test_a_key_in_netrc_counts_for_its_server_only(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", "http://metrics.example.org:8080")
    netrc = tmp_path / "home/.netrc"
    netrc.write_text(f"machine other.example.org login user password {KEY}\n")
    netrc.chmod(0o600)
    assert not has_key()
    netrc.write_text(f"machine metrics.example.org login user password {KEY}\n")
    assert has_key()


def test_disabled_writes_nothing(tmp_path):
    assert log(tmp_path / "run", WandbMode.disabled, range(1, 3)).run is None
    assert list((tmp_path / "run").iterdir()) == []


def test_online_a_resume_continues_the_same_run(tmp_path, monkeypatch, capfd):
    from tests.recipes.wandb_server import Server

    folder = tmp_path / "run"
    with Server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        for steps in (range(1, 3), range(3, 4), range(4, 5), range(5, 6)):
            log(folder, WandbMode.auto, steps)
    assert "offline" not in capfd.readouterr().out
    assert list(server.runs) == [run_id(folder)]
    assert server.resumed == [run_id(folder)] * 3, "each later part asked for the first"
    history = server.runs[run_id(folder)]
    assert sorted(history) == [1, 2, 3, 4, 5]
    assert [history[step]["loss"] for step in sorted(history)] == [5.0 / step for step in range(1, 6)]


def offline_within(seconds: float, folder: Path, capfd, reason: str) -> None:
    began = time.monotonic()
    log(folder, WandbMode.auto, range(1, 3))
    assert time.monotonic() - began < seconds
    said = capfd.readouterr()
    lines = [line for line in (said.out + said.err).splitlines() if line.strip()]
    assert len(lines) == 2 and reason in lines[0] and "logging offline" in lines[0] and "wandb sync" in lines[1], lines
    (part,) = folder.glob("wandb/offline-run-*")
    assert [r["history"]["item"]["_step"] for r in records(part) if r["type"] == "history"] == [1, 2]


def test_no_server_is_one_line_and_offline(tmp_path, monkeypatch, capfd):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    offline_within(60, tmp_path / "run", capfd, f"http://127.0.0.1:{port} does not answer")


def test_a_server_that_never_answers_is_one_line_and_offline(tmp_path, monkeypatch, capfd):
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        monkeypatch.setenv("WANDB_BASE_URL", url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        assert not answers(url, patience=0.5)
        offline_within(60, tmp_path / "run", capfd, "does not answer")


def test_a_server_that_refuses_is_one_line_and_offline(tmp_path, monkeypatch, capfd):
    from tests.recipes.wandb_server import Server

    with Server(status=401) as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        offline_within(60, tmp_path / "run", capfd, "refuses this run")


def test_what_a_run_logs_beside_its_numbers(tmp_path):
    """Group, tags, curves over tokens, pictures, a sample; no alert where nothing was wrong."""
    log(tmp_path / "run", WandbMode.offline, range(1, 3), group="ladder", tags=["a", "b"])
    (part,) = (tmp_path / "run").glob("wandb/offline-run-*")
    found = logged(part)
    assert (found.run.run_group, list(found.run.tags)) == ("ladder", ["a", "b"])
    assert {(m.name or m.glob_name, m.step_metric) for m in found.metrics} >= {("tokens", ""), ("*", "tokens")}
    assert found.kinds["pictures/residuals"] == "image-file" and found.kinds["sample"] == "table-file"
    assert found.alerts == []


def test_a_stall_is_told_once_until_it_has_passed():
    told = []
    alerts = Alerts(lambda title, text, error=False: told.append((title, text, error)), patience=0.2)
    step = lambda number: alerts.step(StepResult(number, [5.0], 1, 1, 0.1, StepReport(number, 1e-3, 1.0, 1.0, False)))
    alerts.start()
    for number in (3, 4):
        step(number)
        deadline = time.monotonic() + 30
        while (not told or f"after step {number}" not in told[-1][1]) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
        assert told[-1] == ("no step", f"none for 0.00333 minutes after step {number}", True)
    assert len(told) == 2
    alerts.close(None)
    assert len(told) == 2


def test_alerts_of_spikes_and_failures(tmp_path):
    log(tmp_path / "run", WandbMode.offline, range(1, 7), skipped={2, 3, 5}, broken=True)
    (part,) = (tmp_path / "run").glob("wandb/offline-run-*")
    found = logged(part)
    assert found.alerts == [
        ("step 2 was skipped", "spike; loss 5", "WARN"),
        ("step 5 was skipped", "spike; loss 5", "WARN"),
        ("failed after step 6", "ArithmeticError: it broke", "ERROR"),
    ]
    assert found.exit == 1


def test_what_a_run_sends_is_what_its_metrics_file_holds(tmp_path):
    write_corpus(tmp_path / "corpus")
    words = ("run.steps=3", "run.sample_tokens=0", "run.eval_every=2", "wandb.mode=offline")
    code, folder = do(tmp_path, "run", *words)
    assert code == 0
    (part,) = folder.glob("wandb/offline-run-*")
    sent = logged(part)
    own = lambda row: {key: value for key, value in row.items() if not key.startswith(("_", "pictures/", "sample"))}
    kept = [dict(flat(record)) for record in metrics(folder)]
    assert [row["_step"] for row in sent.history] == [1, 2, 3]
    assert [own(row) for row in sent.history] == [{k: v for k, v in row.items() if k != "step"} for row in kept]
    assert sent.run.run_id == json.loads((folder / "checkpoints/step_3/state.json").read_text())["wandb"]
    pictures = [sorted(key for key in row if key.startswith("pictures/")) for row in sent.history]
    assert pictures[0] == [] and pictures[1] == pictures[2] == ["pictures/experts", "pictures/loss", "pictures/residuals"]


@pytest.mark.slow
def test_a_kill_loses_less_than_five_seconds(tmp_path):
    """A process logs ten steps a second and says so; SIGKILL takes it and the client's service."""
    script = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from optim import StepReport
from recipes.callbacks.wandb import Wandb
from recipes.config import WandbConfig, WandbMode
from recipes.trainer import StepResult
callback = Wandb(WandbConfig(mode=WandbMode.offline), Path(sys.argv[1]), {})
callback.start(SimpleNamespace(results={}))
for step in range(1, 1000):
    report = StepReport(step, 1e-3, 1.0, 1.0, False)
    callback.step(SimpleNamespace(results={}), StepResult(step, [5.0], 1, 1, 0.1, report, {"step": step, "loss": 1.0}))
    print(time.time(), flush=True)
    time.sleep(0.1)
"""
    folder = tmp_path / "run"
    folder.mkdir()
    command = [sys.executable, "-c", script, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    said = []
    for line in process.stdout:
        if not line.startswith("W&B"):
            said.append(float(line))
        if len(said) == 100:
            break
    os.killpg(process.pid, signal.SIGKILL)
    killed = time.time()
    process.wait()
    (part,) = folder.glob("wandb/offline-run-*")
    last = logged(part).history[-1]["_step"]
    assert killed - said[last - 1] < 5.0, f"step {last} of {len(said)} is the last on the disk"
