"""A resumed run is the uninterrupted run, bit for bit, and nothing else may continue it."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from recipes.compose import compose
from recipes.errors import UserError
from recipes.run_folder import cut_metrics, open_run
from recipes.training import train
from tests.recipes.small_run import curve, do, metrics, resume, same_checkpoint, words, write_corpus

ROOT = Path(__file__).parents[2]
STEPS = ("run.steps=6", "checkpoint.every=2", "checkpoint.keep_last=9", "run.eval_every=3", "run.sample_tokens=4")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("resume")
    write_corpus(home / "corpus")
    return home


@pytest.fixture(scope="module")
def whole(home):
    """The uninterrupted run."""
    code, folder = do(home, "whole", *STEPS)
    assert code == 0
    return folder


def go_back(whole: Path, to: Path, step: int) -> Path:
    """A copy of a run as a crash after `step` leaves it: later metrics written, later checkpoints never finished."""
    shutil.copytree(whole, to)
    for name in ("summary.json", "summary.txt", "loss.png"):
        (to / name).unlink(missing_ok=True)
    for path in (to / "checkpoints").glob("step_*"):
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)
    (to / "checkpoints" / "latest").write_text(f"step_{step}\n")
    return to


@pytest.mark.parametrize("step", [2, 4])
def test_resume_continues_bit_for_bit(home, whole, step):
    folder = go_back(whole, home / f"back{step}", step)
    torch.manual_seed(99 + step)  # what the process drew before must not matter
    assert len(metrics(folder)) == 6, "the crash left lines beyond its checkpoint"
    assert resume(folder) == 0
    assert curve(folder) == curve(whole)
    same_checkpoint(folder / "checkpoints/step_6", whole / "checkpoints/step_6")
    assert (folder / "summary.json").is_file() and (folder / "loss.png").is_file()


def test_a_run_killed_after_its_last_save_still_draws_everything(home, whole):
    folder = go_back(whole, home / "atend", 6)
    for path in folder.glob("*.png"):
        path.unlink()
    assert resume(folder, "run.sample_tokens=0") == 0
    assert {path.name for path in folder.glob("*.png")} == {path.name for path in whole.glob("*.png")}
    assert (folder / "residuals.png").is_file() and len(metrics(folder)) == 6


def test_resume_in_bf16_keeps_the_masters(home):
    _, whole = do(home, "bf16", *STEPS, "precision=bf16")
    folder = go_back(whole, home / "bf16back", 4)
    assert resume(folder) == 0
    assert curve(folder) == curve(whole)
    same_checkpoint(folder / "checkpoints/step_6", whole / "checkpoints/step_6")


def test_resume_inside_a_batch_ramp_reads_on_where_it_stopped(home):
    """And the guard's record, whose statistics decide from the third step on, is that of the uninterrupted run."""
    ramp = ("data.ramp.start=2", "data.ramp.samples=5", "optim.guard.min_steps=2", "optim.guard.window=3")
    _, whole = do(home, "ramp", *STEPS, *ramp)
    assert [r["batch_size"] for r in metrics(whole)] == [2, 2, 2, 4, 4, 4]
    assert [r["tokens"] for r in metrics(whole)] == [64, 128, 192, 320, 448, 576]
    folder = go_back(whole, home / "rampback", 2)
    assert resume(folder) == 0
    assert curve(folder) == curve(whole)
    same_checkpoint(folder / "checkpoints/step_6", whole / "checkpoints/step_6")


def test_a_run_that_the_guard_stopped_goes_on_with_other_thresholds(home, capsys):
    """Step 3 is called a spike for being above the median at all; told otherwise, the run goes on from step 2."""
    strict = (
        "optim.guard.min_steps=2",
        "optim.guard.max_skipped=1",
        "optim.guard.deviations=0",
        "optim.guard.grad_norm=1.000001",
    )
    code, folder = do(home, "strict", *[w for w in STEPS if "every=2" not in w], *strict, "checkpoint.every=0")
    said = capsys.readouterr().out
    assert code == 1 and "skipped: spike of the" in said and "optim.guard.enabled=false" in said
    stopped = len(metrics(folder))
    assert f"the last good state is {folder / 'checkpoints' / f'step_{stopped - 1}'}" in said
    assert resume(folder, "optim.guard.enabled=false") == 0
    assert [r["skipped"] for r in metrics(folder)] == [False] * 6


def test_evaluating_and_saving_leave_no_trace(home, whole):
    _, other = do(home, "quiet", "run.steps=6", "run.eval_every=0", "checkpoint.every=0", "run.sample_tokens=0")
    assert [r["loss"] for r in metrics(other)] == [r["loss"] for r in metrics(whole)]
    same_checkpoint(other / "checkpoints/step_6", whole / "checkpoints/step_6")
    assert not (other / "sample.txt").exists()


def start(args: list[str]) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "recipes.cli", "pretrain", *args],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_step(process: subprocess.Popen, folder: Path, step: int) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until and process.poll() is None:
        if (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").read_text().count("\n") >= step:
            return
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"step {step} was not reached:\n{process.communicate()[0]}")


@pytest.mark.slow
def test_ctrl_c_saves_and_its_printed_command_continues(home, whole):
    folder = home / "stopped"
    process = start(words(home, "stopped", *STEPS, "checkpoint.every=0"))
    wait_for_step(process, folder, 2)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 130, said
    done = len(metrics(folder))
    assert 2 <= done < 6, said
    assert (folder / "checkpoints/latest").read_text() == f"step_{done}\n"
    command = next(line.split() for line in said.splitlines() if line.strip().startswith("k3 pretrain"))
    process = start(command[2:])
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert curve(folder) == curve(whole)
    same_checkpoint(folder / "checkpoints/step_6", whole / "checkpoints/step_6")


def test_a_killed_run_continues_with_auto(home, whole):
    folder = home / "killed"
    process = start(words(home, "killed", *STEPS, "run.resume=auto"))
    wait_for_step(process, folder, 3)
    process.kill()
    process.wait()
    said = metrics(folder)
    assert not (folder / "summary.json").exists() and len(said) >= 3
    code, _ = do(home, "killed", *STEPS, "run.resume=auto")
    assert code == 0
    assert curve(folder) == curve(whole)
    same_checkpoint(folder / "checkpoints/step_6", whole / "checkpoints/step_6")


def test_a_complete_run_says_so_and_is_left_alone(whole, capsys):
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.is_file() and path.name != ".lock"}
    assert resume(whole) == 0
    assert "complete" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.is_file() and path.name != ".lock"} == before


@pytest.mark.parametrize("change", ["model.layers=5", "optim.lr=1e-4", "run.steps=9", "run.seed=1", "data.batch_size=8"])
def test_what_would_change_the_numbers_is_refused(whole, change):
    with pytest.raises(UserError, match=change.split("=")[0]):
        resume(whole, change)


def test_what_changes_no_number_is_taken(home, whole):
    folder = go_back(whole, home / "free", 4)
    assert resume(folder, "checkpoint.keep_last=1", "run.eval_every=0", "activations=full") == 0
    assert [r["loss"] for r in metrics(folder)] == [r["loss"] for r in metrics(whole)]
    assert [p.name for p in (folder / "checkpoints").glob("step_*")] == ["step_6"]


def test_a_folder_with_a_run_is_not_overwritten(home, whole):
    with pytest.raises(UserError, match="already holds a run"):
        do(home, "whole", *STEPS)
    cfg = compose(words(home, "race", *STEPS))
    shutil.copytree(whole, home / "race")  # another command was faster between composing and starting
    with pytest.raises(UserError, match=r"already holds a run; continue it with run\.resume="):
        train(cfg)


def test_a_run_without_a_checkpoint_cannot_be_resumed_by_name(home):
    cfg = compose(words(home, "young", *STEPS))
    open_run(cfg).close()
    cfg.run.resume = cfg.run.dir
    with pytest.raises(UserError, match="no checkpoint yet"):
        train(cfg)
    cfg.run.resume = "auto"
    folder = open_run(cfg)
    assert folder.checkpoint is None
    folder.close()


def test_one_process_a_folder(home):
    cfg = compose(words(home, "held", *STEPS, "run.resume=auto"))
    folder = open_run(cfg)
    with pytest.raises(UserError, match=f"process {os.getpid()} trains in it"):
        open_run(cfg)
    folder.close()
    open_run(cfg).close()


def test_other_data_is_refused(home, whole):
    folder = go_back(whole, home / "otherdata", 4)
    file = home / "corpus/00.txt"
    text, times = file.read_text(), file.stat()
    try:
        file.write_text(text + "another word\n")
        with pytest.raises(UserError, match="was trained on the prepared data"):
            resume(folder)
    finally:
        file.write_text(text)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_damaged_checkpoint_is_a_message(home, whole):
    folder = go_back(whole, home / "damaged", 4)
    file = folder / "checkpoints/step_4/__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"__0_0\.distcp: damaged[^$]*go on from an earlier one \(step_2\)"):
        resume(folder)


def test_cut_metrics_drops_later_steps_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.5}\n{"step": 2, "loss": 1.25}\n{"step": 3, "loss": 1.0}\n{"step": 4, "lo')
    cut_metrics(path, 2)
    assert [(r["step"], r["loss"]) for r in metrics(tmp_path)] == [(1, 1.5), (2, 1.25)]
    cut_metrics(tmp_path / "none.jsonl", 2)


def test_an_earlier_checkpoint_of_a_complete_run_is_gone_on_from(home, whole):
    folder = home / "earlier"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "checkpoints/step_6")
    (folder / "checkpoints/latest").write_text("step_4\n")
    assert resume(folder) == 0
    same_checkpoint(folder / "checkpoints/step_6", whole / "checkpoints/step_6")
