"""`k3 pretrain` in several processes: the numbers of one, one voice, and nobody left waiting."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from parallel.local import Helper, RankError
from recipes import cli, launch, processes
from recipes.compose import compose
from recipes.errors import UserError
from recipes.run_folder import check_run, open_run
from tests.recipes.small_run import do, metrics, resume, same_checkpoint, words, write_corpus
from tests.recipes.test_resume import start, wait_for_step

STEPS = 6
SHORT = ("model.layers=4", f"run.steps={STEPS}", "checkpoint.keep_last=9", "run.eval_every=3", "run.sample_tokens=3")
DATA = ("parallel.dp=2", "parallel.ep=2")
TENSOR = ("parallel=tensor",)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("ranks")
    write_corpus(home / "corpus")
    return home


@pytest.fixture(scope="module")
def single(home):
    """The run in one process."""
    code, folder = do(home, "single", *SHORT)
    assert code == 0
    return folder


def run(helper: Helper, home: Path, name: str, *more: str, disturb: tuple[str, int] | None = None) -> tuple[list[dict], Path]:
    """On two ranks: (what each returns, run folder)."""
    overrides = words(home, name, *SHORT, *more)
    return helper.run_ranks("tests.recipes.ranks:train", 2, overrides, str(home / f"{name}.log"), disturb), home / name


def same_curve(one: Path, other: Path, tolerance: float) -> None:
    """Asserts that two runs had the same losses, norms and expert loads at every step."""
    a, b = metrics(one), metrics(other)
    assert [r["step"] for r in a] == [r["step"] for r in b] == list(range(1, STEPS + 1))
    for mine, theirs in zip(a, b):
        for key in ("loss", "mtp_loss/1", "grad_norm", "heldout_loss", "max_logit", "update_rms/min", "update_rms/max"):
            assert (key in mine) == (key in theirs)
            if key in mine:  # extremes are single values, and not averages over thousands
                allowed = tolerance * (10 if key.startswith(("max", "update")) else 1)
                assert mine[key] == pytest.approx(theirs[key], rel=allowed, abs=0), f"step {mine['step']}: {key}"
        assert mine["load/experts"] == theirs["load/experts"] and mine["tokens"] == theirs["tokens"]
        means = [key for key in mine if key.startswith("update_rms/mean/")]
        assert means and all(mine[key] == pytest.approx(theirs[key], rel=1e-3) for key in means)
        heads, whole = mine["update_rms/heads"], theirs["update_rms/heads"]
        assert heads.keys() == whole.keys() and all(heads[n] == pytest.approx(whole[n], rel=1e-3) for n in heads)


def same_export(one: Path, other: Path) -> None:
    """Asserts that two runs have left the same model in the published layout, up to what their curves differ by."""
    mine, theirs = (load_file(path / "hf/model.safetensors") for path in (one, other))
    assert mine.keys() == theirs.keys() and (one / "hf/config.json").read_text() == (other / "hf/config.json").read_text()
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=0, atol=1e-3 * (1 + value.abs().max().item()), msg=name)


def test_a_pipeline_does_all_that_one_process_does(home, helper, single):
    """The curve, held-out losses, sample, pictures and sizes, with stages on both ranks that one micro-batch crosses twice."""
    done, folder = run(helper, home, "pipeline", "parallel.pp=2", "parallel.vpp=2", "parallel.group=2")
    assert [d["code"] for d in done] == [0, 0]
    same_curve(folder, single, 1e-5)
    assert (folder / "sample.txt").read_text() == (single / "sample.txt").read_text()
    assert {"loss.png", "experts.png", "residuals.png"} <= {path.name for path in folder.iterdir()}
    one, two = (json.loads((path / "summary.json").read_text()) for path in (single, folder))
    assert {k: one["model"][k] for k in ("parameters", "active")} == {k: two["model"][k] for k in ("parameters", "active")}
    said = (home / "pipeline.log").read_text()
    assert said.count("pipeline rank 0:") == said.count("pipeline rank 1:") == 1, "the optimizers of all stages are described"
    same_export(folder, single)


@pytest.mark.slow
def test_the_command_computes_what_one_process_does_and_a_stopped_run_continues_bit_for_bit(home, helper, single):
    folder = home / "command"
    process = start(words(home, "command", *SHORT, *DATA, "checkpoint.every=0"))
    wait_for_step(process, folder, 2)
    process.send_signal(signal.SIGTERM)  # to the process that the user sees
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    done = len(metrics(folder))
    assert 2 <= done < STEPS and (folder / "checkpoints/latest").read_text() == f"step_{done}\n", said
    command = next(line.split() for line in said.splitlines() if line.strip().startswith("k3 pretrain"))
    process = start(command[2:])
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and "Traceback" not in said, said
    assert said.count(f"continuing from {folder / 'checkpoints'}/step_{done}") == 1, "one voice"
    assert "2 processes: ep 2, dp 2" in said
    same_export(folder, single)
    assert json.loads((folder / "summary.json").read_text())["parallel"]["dp"] == 2
    assert (folder / "sample.txt").read_text() == (single / "sample.txt").read_text()
    same_curve(folder, single, 1e-5)

    _, whole = run(helper, home, "whole", *DATA)
    same_curve(folder, whole, 0)
    same_checkpoint(folder / f"checkpoints/step_{STEPS}", whole / f"checkpoints/step_{STEPS}")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TENSOR, ("parallel.pp=2", "parallel.vpp=2")], ids=["tensor", "pipeline"])
def test_a_layout_continues_bit_for_bit(layout, home, helper, single):
    name = f"whole-{len(layout)}"
    done, whole = run(helper, home, name, *layout, "checkpoint.every=2")
    assert [d["code"] for d in done] == [0, 0]
    same_curve(whole, single, 1e-5)
    folder = home / f"{name}-back"
    shutil.copytree(whole, folder)
    (folder / "summary.json").unlink()
    for step in (4, 6):
        shutil.rmtree(folder / f"checkpoints/step_{step}")
    (folder / "checkpoints/latest").write_text("step_2\n")
    log = str(home / f"{name}-back.log")
    helper.run_ranks("tests.recipes.ranks:train", 2, [f"run.resume={folder}", "wandb.mode=disabled"], log)
    same_curve(folder, whole, 0)
    same_checkpoint(folder / f"checkpoints/step_{STEPS}", whole / f"checkpoints/step_{STEPS}")


def go_back(whole: Path, to: Path, step: int) -> Path:
    shutil.copytree(whole, to)
    (to / "summary.json").unlink(missing_ok=True)
    for later in (to / "checkpoints").glob("step_*"):
        if int(later.name.removeprefix("step_")) > step:
            shutil.rmtree(later)
    (to / "checkpoints/latest").write_text(f"step_{step}\n")
    return to


def test_a_run_continues_on_another_layout_and_back(home, helper):
    """Two steps on one rank, two on two tensor ranks in other micro-batches, two on one again: the curve of one process."""
    _, whole = do(home, "unmoved", *SHORT, "checkpoint.every=2")
    folder, log = go_back(whole, home / "moved", 2), home / "moved.log"
    typed = [f"run.resume={folder}", "wandb.mode=disabled", *TENSOR, "data.micro_batch_size=4"]
    done = helper.run_ranks("tests.recipes.ranks:train", 2, typed, str(log), ("signal", 4))
    assert [d["progress"].step for d in done] == [4, 4]
    said = log.read_text()
    assert said.count("step_2 was written by another layout (parallel.tp 1 -> 2, parallel.sp false -> true)") == 1
    assert f"k3 pretrain run.resume={folder} data.micro_batch_size=4 parallel.tp=2 parallel.sp=true" in said
    assert resume(folder) == 0
    same_curve(folder, whole, 1e-5)
    assert [r["loss"] for r in metrics(folder)][:2] == [r["loss"] for r in metrics(whole)][:2]


MOVES = [("parallel=expert", "parallel.dp=2"), ("parallel.pp=2", "parallel.vpp=2"), ("parallel=context",)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", MOVES)
def test_a_run_continues_on_any_layout(home, helper, single, layout):
    _, whole = do(home, f"unmoved-{layout[0][9:11]}", *SHORT, "checkpoint.every=2")
    folder = go_back(whole, home / f"moved-{layout[0][9:11]}", 2)
    helper.run_ranks("tests.recipes.ranks:train", 2, [f"run.resume={folder}", "wandb.mode=disabled", *layout], None)
    same_curve(folder, whole, 1e-5)


def test_one_rank_asked_to_stop_stops_all_after_the_same_step(home, helper):
    done, folder = run(helper, home, "asked", *DATA, disturb=("signal", 2))
    assert [(d["code"], d["progress"].step) for d in done] == [(0, 2), (0, 2)]
    assert (folder / "checkpoints/latest").read_text() == "step_2\n" and not (folder / "summary.json").exists()
    assert "SIGUSR1 at another rank" in (home / "asked.log").read_text()


def test_a_loss_that_one_rank_lost_is_skipped_on_all(home, helper):
    done, folder = run(helper, home, "lost", *DATA, disturb=("nan", 3))
    assert [d["skipped"] for d in done] == [STEPS - 3] * 2
    assert [r["skipped"] for r in metrics(folder)] == [False] * 3 + [True] * (STEPS - 3)
    assert [r["loss"] is None for r in metrics(folder)] == [False] * 3 + [True] * (STEPS - 3)


def test_a_rank_that_raises_is_heard_once_and_ends_all(home, helper):
    with pytest.raises(RankError, match="died"):
        run(helper, home, "raises", *DATA, disturb=("raise", 2))
    said = (home / "raises.log").read_text()
    assert said.count("Traceback") == 1 and "rank 1 of 2 failed" in said and "rank 1 has had enough" in said


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Has `processes.run` start a shell script in the place of Python: the watching alone."""

    def write(script: str) -> None:
        path = tmp_path / "rank.sh"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(processes.sys, "executable", str(path))

    monkeypatch.setattr(processes, "GRACE", 0.5)
    return write


def test_a_rank_that_dies_ends_the_others_and_is_named(stand_in, capsys):
    stand_in('[ "$RANK" = 1 ] && kill -KILL $$; exec sleep 600')
    began = time.monotonic()
    assert processes.run([], 3) == 128 + signal.SIGKILL
    assert time.monotonic() - began < 60
    assert capsys.readouterr().err == "k3: rank 1 of 3 was ended: Killed\n", "nothing of those that it ends itself"
    assert not [p for p in psutil.Process().children() if p.name() == "sleep"]


def test_the_exit_code_is_that_of_the_rank_that_failed_first(stand_in, capsys):
    stand_in('[ "$RANK" = 0 ] && exit 2; sleep 0.3; exit 1')
    assert processes.run([], 2) == 2
    assert capsys.readouterr().err == ""


def test_a_rank_is_asked_to_stop_when_its_watcher_dies(tmp_path):
    rank = f"""
import os, pathlib, signal, threading, time
from recipes import processes
heard = threading.Event()
signal.signal(signal.SIGUSR1, lambda *_: heard.set())
processes.follow(os.environ)
pathlib.Path({str(tmp_path / "up")!r}).touch()
pathlib.Path({str(tmp_path / "heard")!r}).write_text(str(heard.wait(60)))
"""
    watcher = f"""
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", {rank!r}], env={{**os.environ, {processes.WATCHER!r}: str(os.getpid())}}).wait()
"""
    process = subprocess.Popen([sys.executable, "-c", watcher], cwd=Path(__file__).parents[2])
    wait_for(tmp_path / "up")
    process.kill()
    process.wait()
    wait_for(tmp_path / "heard")
    assert (tmp_path / "heard").read_text() == "True"


def wait_for(path: Path) -> None:
    limit = time.monotonic() + 30
    while not (path.exists() and (path.name == "up" or path.read_text())):
        assert time.monotonic() < limit, f"{path.name} did not come"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_go_on_to_every_rank(stand_in, tmp_path, number):
    stand_in(
        f"trap 'echo $RANK >> {tmp_path}/heard; exit 0' INT TERM USR1; touch {tmp_path}/up$RANK; while :; do sleep 0.05; done"
    )
    before = signal.getsignal(number)

    def tell() -> None:
        while len(list(tmp_path.glob("up*"))) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=tell)
    thread.start()
    assert processes.run([], 2) == 0
    thread.join()
    assert sorted((tmp_path / "heard").read_text().split()) == ["0", "1"]
    assert signal.getsignal(number) == before


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (["parallel.tp=3"], r"parallel\.tp=3: must divide"),
        (["parallel.cp=5", "data.seq_length=32"], r"parallel\.cp=5 and parallel\.tp=1: the 32 tokens"),
        (["parallel.dp=3"], r"data\.batch_size=4: must be a multiple .* 2 x 3 = 6"),
        (["parallel.dp=2", "run.compare_dense=0.5"], r"run\.compare_dense=0\.5: compares at equal time in one process"),
        (["parallel.dp=16", "data.batch_size=16", "data.micro_batch_size=1"], "takes 16 processes, and on CPUs at most 8"),
        (["parallel.dp=2", "parallel.ep=3"], r"parallel\.ep=3: must divide"),
    ],
)
def test_a_layout_that_does_not_fit_is_one_message_and_no_process(home, capsys, monkeypatch, layout, says):
    monkeypatch.setattr(processes, "run", lambda *a: pytest.fail("started processes"))
    assert cli.main(["pretrain", *words(home, "misfit", *layout)]) == 2
    said = capsys.readouterr().err
    assert re.search(says, said), said
    assert not (home / "misfit").exists()


def test_a_layout_must_have_the_processes_that_were_started(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match=r"1 \* 1 \* 1 \* 2 = 2 processes, but 4 were started"):
        compose(["parallel.dp=2"])
    assert compose(["parallel.tp=2"]).parallel.dp == 2, "null takes what the processes leave"


def test_what_the_run_folder_refuses_is_refused_before_a_process_starts(home, capsys, monkeypatch, single):
    monkeypatch.setattr(processes, "run", lambda *a: pytest.fail("started processes"))
    assert cli.main(["pretrain", f"run.resume={single}", "run.seed=2"]) == 2
    assert re.search(r"k3: run\.seed=2: the run in .* has 0", capsys.readouterr().err)
    assert cli.main(["pretrain", *words(home, "single", *DATA)]) == 2
    assert "already holds a run" in capsys.readouterr().err


def test_checking_a_run_folder_leaves_it_as_it_was(home):
    cfg = compose(words(home, "checked", "run.resume=auto"))
    check_run(cfg)
    assert not (home / "checked").exists()
    open_run(cfg).close()
    check_run(cfg)
    assert (home / "checked/config.yaml").is_file()


def test_a_process_of_srun_joins_as_one_of_torchrun():
    slurm = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
    assert processes.joined(slurm) == {} and processes.count(slurm) is None
    env = slurm | {"MASTER_ADDR": "node1"}
    env |= processes.joined(env)
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["MASTER_PORT"]) == ("3", "8", "1", "29500")
    assert (processes.count(env), processes.rank(env)) == (8, 3)
    assert processes.joined(env) == {}, "torchrun's own words stay"


def test_ranks_share_the_cores_unless_the_user_says_otherwise():
    threads = lambda env: int(processes.environment(env, 1, 2, 1234)["OMP_NUM_THREADS"])
    assert threads({}) == max(1, launch.physical_cores() // 2)
    assert threads({"OMP_NUM_THREADS": "64", launch.CHOSEN: "OMP_NUM_THREADS,MALLOC_TOP_PAD_"}) == threads({})
    assert threads({"OMP_NUM_THREADS": "64", launch.CHOSEN: "MALLOC_TOP_PAD_"}) == 64
