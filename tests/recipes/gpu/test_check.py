"""The GPU check's script where there is no GPU: what it refuses, and that its checks can fail."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from recipes.gpu import check, rows, wheels
from recipes.gpu.check import Check
from recipes.gpu.tools import disagreement, distance

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: `make gpu-check` is for it")


@no_gpu
def test_without_a_gpu_it_says_so_in_one_line_and_exits_with_2():
    done = subprocess.run([sys.executable, "-m", "recipes.gpu.check"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("gpu-check: torch sees no CUDA device") and "--cpu" in line


@pytest.mark.parametrize("words", [["goldenn"], ["--wheels"], ["--wheels", "nowhere"]])
def test_wrong_words_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert check.main(words) == 2
    assert "gpu-check: " in capsys.readouterr().err


@no_gpu
def test_one_check_as_a_process_and_its_table(capsys: pytest.CaptureFixture[str]):
    assert check.main(["--cpu", "te"]) == 0
    out = capsys.readouterr().out
    assert out.count("NOT A GPU") == 2 and "SKIP te (" in out
    _, row = out.split("\n\n")[1].splitlines()
    assert row.split()[:2] == ["te", "SKIP"] and "needs a GPU" in row


def test_a_check_that_crashes_or_hangs_fails(tmp_path: Path):
    crash = check._one(Check("nosuch", 60, ""), 60, tmp_path, {**os.environ, "PYTHONPATH": str(ROOT)}, True)
    assert crash.state == "FAIL" and "nosuch" in crash.text
    hang = check._one(Check("golden", 60, ""), 0.05, tmp_path, dict(os.environ), True)
    assert hang.state == "FAIL" and "not done" in hang.text


def test_wheels_are_unpacked_behind_the_checkout(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "some-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried_along.py", "VALUE = 7\n")
    paths = check._environment(tmp_path / "out", tmp_path, True)
    code = "import carried_along, k3; print(carried_along.VALUE, k3.__file__)"
    done = subprocess.run([sys.executable, "-S", "-c", code], env=paths, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.split() == ["7", str(ROOT / "k3" / "__init__.py")], done.stderr


def test_every_package_to_carry_is_pinned():
    lines = wheels.pinned(ROOT / "constraints.txt")
    assert len(lines) == len(wheels.PACKAGES) and "megatron-core==0.19.2" in lines


@pytest.mark.parametrize("name", [name for name, *_ in rows.operators()])
def test_operators_agree_with_float64_and_damage_is_seen(name: str):
    run, inputs = next((run, inputs) for n, run, inputs, _ in rows.operators() if n == name)
    assert disagreement(run, inputs, CPU, torch.float32) < 1e-4
    moved = [key for key, value in inputs.items() if value.is_floating_point()][-1]  # a norm does not see the size of its first
    damaged = lambda **x: run(**{**x, moved: x[moved] * 1.01})
    assert disagreement(damaged, inputs, CPU, torch.float32, run) > 1e-3


def test_kda_agrees_with_the_recurrence_and_damage_is_seen():
    """The fla check with the CPU's own kernel in fla's place."""
    from kernels.kda import kda

    inputs = rows.kda_inputs(40, 16)
    exact = lambda **x: kda(**x, backend="recurrent")
    assert disagreement(lambda **x: kda(**x, backend="chunked"), inputs, CPU, torch.bfloat16, exact, ("A_log", "dt_bias")) < 3e-2
    leaky = lambda **x: kda(**{**x, "document_starts": None}, backend="chunked")
    assert disagreement(leaky, inputs, CPU, torch.bfloat16, exact, ("A_log", "dt_bias")) > 3e-2


def test_distance_is_relative():
    assert distance(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)


@no_gpu
@pytest.mark.slow
def test_all_that_a_cpu_can_run_passes(capsys: pytest.CaptureFixture[str]):
    assert check.main(["--cpu", "golden", "kernels", "steps", "nano"]) == 0
    assert capsys.readouterr().out.count("PASS") == 8
