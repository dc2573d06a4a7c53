"""The look at the nodes before training: real processes that meet, on made-up nodes, one of which is unfit.

That fit ones pass is seen in tests/cluster.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from slurm.health import Place, clock_faults, local_faults


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ranks(folder: Path, which: tuple[int, ...], *more: str, timeout: int = 60) -> list[tuple[int, str]]:
    """(exit code, what it said) of some of the four ranks of two nodes."""
    env = {**os.environ, "SLURM_NTASKS": "4", "K3_NODES": "a17 a03", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    options = {"gpus": 0, "timeout": timeout, "folder": folder, "free-gib": 0, "clock-skew": 30}
    words = [f"--{name}={value}" for name, value in options.items()]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "slurm.health", *words, *(more if rank >= 2 else ())],
            env={**env, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in which
    ]
    said = [process.communicate(timeout=120)[0] for process in started]
    return [(process.returncode, text) for process, text in zip(started, said)]


@pytest.mark.slow
def test_a_full_disk_of_one_node_is_named_once_and_all_end(tmp_path: Path) -> None:
    (first, said), *others = ranks(tmp_path, (0, 1, 2, 3), "--free-gib=1e9")
    assert first == 1 and [code for code, _ in others] == [1] * 3
    assert said.startswith("k3: health: a03: ") and said.count("\n") == 1 and "GiB left in" in said


@pytest.mark.slow
def test_a_node_that_does_not_come_is_named(tmp_path: Path) -> None:
    said = ranks(tmp_path, (0, 1), timeout=15)
    assert said == [(1, "k3: health: a03: does not answer within 15 s\n"), (1, "")]


def test_what_a_node_tells_of_itself(tmp_path: Path) -> None:
    assert list(local_faults(0, tmp_path, 0)) == []
    (line,) = local_faults(1000, tmp_path, 0)
    assert line.endswith(" of 1000 GPUs")
    (line,) = local_faults(0, tmp_path / "none", 0)
    assert line == f"{tmp_path / 'none'} cannot be written to (No such file or directory)"


def test_a_clock_that_differs() -> None:
    said = clock_faults({0: 100.0, 1: 100.2, 2: 107.5, 3: 90.0}, 5.0, "a17")
    assert said == {2: "its clock is 7.5 s ahead of that of a17", 3: "its clock is 10.0 s behind that of a17"}


def test_ranks_lie_in_the_order_of_the_nodes() -> None:
    place = Place(rank=5, size=8, local=1, nodes=("b", "a"), address="", port=0)
    assert [place.node(rank) for rank in range(8)] == ["b"] * 4 + ["a"] * 4
