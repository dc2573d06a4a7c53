"""A disk that is full, read-only or has lost a file: one message that says what, and what to go on from."""

import errno
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel import checkpoint
from recipes import cli
from tests.recipes.small_run import do, same_checkpoint, words, write_corpus

STEPS = ("run.steps=3", "checkpoint.every=1", "checkpoint.keep_last=9", "run.eval_every=0", "run.sample_tokens=0")


def mount(*words: str) -> None:
    done = subprocess.run(["mount", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(errno.EPERM, done.stderr.strip())


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("full")
    write_corpus(home / "corpus")
    return home


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    """The run with all the space it needs."""
    code, folder = do(home, "whole", *STEPS)
    assert code == 0
    return folder


@pytest.fixture
def disk(home: Path) -> Iterator[Path]:
    """A small file system of its own, in memory."""
    disk = home / "disk"
    disk.mkdir()
    try:
        mount("-t", "tmpfs", "-o", "size=64m", "none", str(disk))
    except (OSError, FileNotFoundError) as error:
        disk.rmdir()
        pytest.skip(f"NOT TESTED: full and read-only disks, because this user may not mount a tmpfs ({error})")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-R", str(disk)], check=True)
        disk.rmdir()


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def pretrain(capsys: pytest.CaptureFixture[str], *given: str) -> tuple[int, str]:
    """(exit code, what the command complains of)"""
    capsys.readouterr()
    code = cli.main(["pretrain", *given])
    return code, capsys.readouterr().err


def sound(run: Path, whole: Path, steps: list[int]) -> None:
    """Asserts that these checkpoints and nothing else are there, and hold what the uninterrupted run's hold."""
    folder = run / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["latest", *(f"step_{step}" for step in steps)]
    assert checkpoint.latest(folder) == folder / f"step_{steps[-1]}"
    for step in steps:
        same_checkpoint(folder / f"step_{step}", whole / f"checkpoints/step_{step}")


@pytest.mark.parametrize("asynchronous", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_a_full_disk(home: Path, whole: Path, disk: Path, capsys: pytest.CaptureFixture[str], asynchronous: str) -> None:
    """Room for one checkpoint and a half."""
    mount("-o", f"remount,size={int(1.5 * size(whole / 'checkpoints/step_1'))}", str(disk))
    run = disk / "run"
    code, said = pretrain(capsys, *words(home, "disk/run", *STEPS, f"checkpoint.asynchronous={asynchronous}"))
    assert code == 2
    lines = said.splitlines()
    assert lines[0] == f"k3: {run}/checkpoints/step_2 could not be written:"
    assert "No space left on device" in lines[1]
    assert lines[2].startswith(f"k3: the last good checkpoint is {run}/checkpoints/step_1; ") and len(lines) == 3
    sound(run, whole, [1])
    code, said = pretrain(capsys, f"run.resume={run}")
    assert code == 2 and "step_2 could not be written" in said, "still as full"
    sound(run, whole, [1])
    mount("-o", "remount,size=64m", str(disk))
    assert pretrain(capsys, f"run.resume={run}")[0] == 0
    sound(run, whole, [1, 2, 3])


def test_a_read_only_disk_and_a_lost_file(home: Path, whole: Path, disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = disk / "run"
    shutil.copytree(whole, run)
    (run / "summary.json").unlink()
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace(str(whole), str(run)))
    folder = run / "checkpoints"
    shutil.rmtree(folder / "step_3")
    (folder / "latest").write_text("step_2\n")

    mount("-o", "remount,ro", str(disk))
    code, said = pretrain(capsys, f"run.resume={run}")
    assert code == 2 and said == f"k3: run.dir={run}: {run} is no folder that can be written to; give another\n"
    mount("-o", "remount,rw", str(disk))

    mount("--bind", str(folder), str(folder))
    mount("-o", "remount,bind,ro", str(folder))
    code, said = pretrain(capsys, f"run.resume={run}")
    lines = said.splitlines()
    assert code == 2 and lines[0] == f"k3: {folder}/step_3 could not be written:" and "Read-only file system" in lines[1]
    assert lines[2].startswith(f"k3: the last good checkpoint is {folder}/step_2; ") and len(lines) == 3
    subprocess.run(["umount", str(folder)], check=True)
    sound(run, whole, [1, 2])

    gone = folder / "step_2/__0_0.distcp"
    gone.rename(disk / "elsewhere")
    code, said = pretrain(capsys, f"run.resume={run}")
    assert code == 2 and said.splitlines() == [
        f"k3: {folder}/step_2 cannot be loaded:",
        "k3:   __0_0.distcp: missing",
        f"k3: to go on from an earlier one (step_1), write its name into {folder}/latest",
    ]
    (folder / "latest").write_text("step_1\n")
    assert pretrain(capsys, f"run.resume={run}")[0] == 0
    sound(run, whole, [1, 2, 3])
