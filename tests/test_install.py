"""install.sh refuses what cannot work, says what to do, and leaves nothing half-made. Stand-in interpreters play the failures."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "clone"
    folder.mkdir()
    for name in ("install.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    return folder


def interpreter(tmp_path: Path, *, fits: bool, body: str = "") -> Path:
    """A script that answers the questions after the version, and does `body` for everything else it is asked."""
    path = tmp_path / "python"
    path.write_text(
        f'#!/bin/sh\ncase "$*" in *platform*) echo 3.11.9;; *version_info*) exit {0 if fits else 1};; *) {body or ":"};; esac\n'
    )
    path.chmod(0o755)
    return path


def install(clone: Path, python: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHON": str(python)}
    env.pop("EXTRAS", None)  # what this environment was installed with
    return subprocess.run(["./install.sh"], cwd=clone, env=env, capture_output=True, text=True, timeout=60)


def test_an_old_python_is_named_with_what_to_install(clone: Path, tmp_path: Path):
    done = install(clone, interpreter(tmp_path, fits=False))
    assert done.returncode == 1 and "is Python 3.11.9" in done.stderr and "pyenv install 3.12" in done.stderr
    assert not (clone / ".venv").exists()


@pytest.mark.parametrize(
    "body",
    ["mkdir .venv; exit 1", "mkdir -p .venv/bin; printf '#!/bin/sh\\nexit 1' >.venv/bin/python; chmod +x .venv/bin/python"],
)
def test_a_failed_installation_leaves_nothing(clone: Path, tmp_path: Path, body: str):
    done = install(clone, interpreter(tmp_path, fits=True, body=body))
    assert done.returncode == 1 and "half-made .venv is removed" in done.stderr
    assert not (clone / ".venv").exists()


def test_an_interrupted_installation_leaves_nothing(clone: Path, tmp_path: Path):
    done = install(clone, interpreter(tmp_path, fits=True, body="mkdir .venv; kill -TERM $PPID; sleep 1"))
    assert done.returncode == 143 and not (clone / ".venv").exists()


def test_what_is_installed_already_is_not_installed_again(clone: Path, tmp_path: Path):
    (clone / ".venv").mkdir()
    sums = subprocess.run(
        "cat pyproject.toml constraints.txt | cksum", shell=True, cwd=clone, capture_output=True, text=True
    ).stdout.strip()
    (clone / ".venv" / ".installed").write_text(f"{sums} test {clone}\n")
    python = interpreter(tmp_path, fits=False)
    assert install(clone, python).returncode == 0
    (clone / "constraints.txt").write_text("changed\n")
    assert install(clone, python).returncode == 1, "a change of the versions is noticed"
