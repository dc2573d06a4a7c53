"""`k3 bench start`: how long a user waits for help, for a configuration, and for the first step of the nano job."""

from __future__ import annotations

import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from recipes.console import say
from recipes.summary import versions

ROUNDS = 5
LIMITS = {"k3 --help": 0.5, "k3 pretrain --cfg job": 2.0, "first step of nano": 15.0}  # seconds, on two quiet cores


def run() -> None:
    """Prints a line each: median and range of ROUNDS whole commands, in turns; the first step once with its data prepared anew
    and once with what that has left.
    """
    say(", ".join(f"{name} {value}" for name, value in versions().items()) + f", load {psutil.getloadavg()[0]:.1f}")
    times: dict[str, list[float]] = {"k3 --help": [], "k3 pretrain --cfg job": []}
    for _ in range(ROUNDS):
        for name, took in times.items():
            took.append(whole(name.split()[1:]))
    for name, took in times.items():
        say(_line(name, took))
    home = Path(tempfile.mkdtemp(prefix="start-"))
    try:
        for number, name in enumerate(("with its data prepared anew", "with prepared data")):
            seconds = first_step(home, str(number))
            say(f"{'first step of nano':<24} {seconds:6.2f} s {name} (limit {LIMITS['first step of nano']:.1f})")
    finally:
        shutil.rmtree(home)


def whole(words: Sequence[str]) -> float:
    began = time.perf_counter()
    subprocess.run([_k3(), *words], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def first_step(home: Path, name: str) -> float:
    """Seconds from the command to the line that tells of its first step; the run is then told to stop."""
    where = (f"run.dir={home / name}", f"data.cache={home / 'cache'}", "wandb.mode=disabled")
    began = time.perf_counter()
    process = subprocess.Popen([_k3(), "pretrain", *where], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    took, said = None, []
    for line in process.stdout:
        said.append(line)
        if took is None and line.startswith("step 1/"):
            took = time.perf_counter() - began
            process.send_signal(signal.SIGTERM)
    if process.wait() or took is None:
        raise RuntimeError("k3 pretrain did not tell of a step:\n" + "".join(said))
    return took


def _line(name: str, took: Sequence[float]) -> str:
    spread = f"({min(took):.2f} to {max(took):.2f}) of {len(took)}"
    return f"{name:<24} {statistics.median(took):6.2f} s {spread} (limit {LIMITS[name]:.1f})"


def _k3() -> str:
    return str(Path(sys.executable).with_name("k3"))
