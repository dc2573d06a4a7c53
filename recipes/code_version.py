"""Which version of this project runs."""

from __future__ import annotations

import subprocess
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]


def code_version() -> str:
    """The package's version, with the commit of the checkout it runs from and whether files in it were changed since."""
    base = version("k3-training")
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        changed = bool(_git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return base  # no git, or no checkout
    return f"{base}+{commit}{'.changed' if changed else ''}"


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()
