"""`make gpu-check`: what must hold on a GPU, in one table, within eight minutes on one device.

Needs torch with Triton and nothing installed: `make gpu-wheels` on a machine with a network puts the rest into a folder, which
travels along (`python -m recipes.gpu.check --wheels gpu-wheels`). Each check is a process of its own (recipes/gpu/rows.py), so
that a fault on the device or a hang costs one line. `--cpu` runs what a CPU can, to try the script itself; that proves nothing
about a GPU. Names of checks run those alone. Exit code: 0 nothing failed, 1 something did, 2 there is no GPU, or a wrong word.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUDGET = 450.0  # seconds for all checks: what does not fit is skipped, and says so
LEAST = 15.0  # seconds: with less no check is begun


@dataclass(frozen=True)
class Check:
    name: str
    limit: float  # seconds
    about: str


CHECKS = (
    Check("golden", 90, "the released layout's golden vectors: logits, loss and gradients in float32 and float64"),
    Check("kernels", 60, "every operator's path here against float64 on the CPU, forward and backward"),
    Check("fla", 90, "fla-core's KDA against the recurrence, forward and backward, with documents"),
    Check("steps", 150, "training steps of the tiny model in float64 here against the CPU: losses and final weights"),
    Check("nano", 120, "bf16 training steps of model=nano"),
    Check("small", 90, "bf16 training steps of model=small, a billion parameters"),
    Check("te", 120, "Transformer Engine's modules in fp8 or mxfp8: one product, and training steps beside bf16's"),
)


@dataclass(frozen=True)
class Outcome:
    state: str  # PASS, FAIL or SKIP
    seconds: float
    text: str


def main(words: Sequence[str]) -> int:
    """Prints a line a check as it ends, and the table. Returns the exit code."""
    words = list(words)
    wheels = Path(_taken(words, "--wheels")) if "--wheels" in words else None
    on_cpu = "--cpu" in words
    names = [word for word in words if word != "--cpu"]
    known = [check.name for check in CHECKS]
    if wrong := [name for name in names if name not in known]:
        return _refused(f"{wrong[0]}: no such check; there are {', '.join(known)}, and --cpu and --wheels FOLDER")
    if wheels is not None and not list(wheels.glob("*.whl")):
        return _refused(f"--wheels {wheels}: holds no wheels; make them with `make gpu-wheels` where there is a network")
    import torch

    if not on_cpu and not torch.cuda.is_available():
        return _refused("torch sees no CUDA device, and these checks are for one; --cpu runs what a CPU can, to try the script")
    device = torch.cuda.get_device_name() if not on_cpu else "the CPU: NOT A GPU, nothing here is shown about one"
    print(f"gpu-check on {device}, torch {torch.__version__}, CUDA {torch.version.cuda}", flush=True)
    chosen = [check for check in CHECKS if not names or check.name in names]
    with tempfile.TemporaryDirectory() as folder:
        environment = _environment(Path(folder), wheels, on_cpu)
        outcomes = _all(chosen, Path(folder), environment, on_cpu)
    print(f"\n{'check':<9} {'result':<6} {'s':>6}  {device}")
    for check, outcome in outcomes:
        print(f"{check.name:<9} {outcome.state:<6} {outcome.seconds:6.1f}  {outcome.text}")
    return int(any(outcome.state == "FAIL" for _, outcome in outcomes))


def _all(checks: Sequence[Check], folder: Path, environment: dict[str, str], on_cpu: bool) -> list[tuple[Check, Outcome]]:
    end = time.monotonic() + BUDGET
    outcomes = []
    for check in checks:
        left = end - time.monotonic()
        if left < LEAST:
            outcome = Outcome("SKIP", 0.0, f"the budget of {BUDGET:.0f} s is spent")
        else:
            outcome = _one(check, min(check.limit, left), folder, environment, on_cpu)
        print(f"{outcome.state} {check.name} ({check.about}): {outcome.text}", flush=True)
        outcomes.append((check, outcome))
    return outcomes


def _one(check: Check, limit: float, folder: Path, environment: dict[str, str], on_cpu: bool) -> Outcome:
    result = folder / f"{check.name}.json"
    words = [sys.executable, "-m", "recipes.gpu.rows", check.name, "cpu" if on_cpu else "cuda", str(result)]
    began = time.monotonic()
    try:
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit)
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or ["it printed nothing"]
        text = f"exit code {done.returncode}: {said[0][:300]}"
    except subprocess.TimeoutExpired:
        text = f"not done after {limit:.0f} s"
    seconds = time.monotonic() - began
    if not result.is_file():  # written as the last thing that a check does
        return Outcome("FAIL", seconds, text)
    found = json.loads(result.read_text())
    return Outcome(found["state"], seconds, found["text"])


def _environment(folder: Path, wheels: Path | None, on_cpu: bool) -> dict[str, str]:
    """For a check: the sources of this checkout first, then what the wheels hold (a wheel is an archive of its packages)."""
    paths = [str(ROOT)]
    if wheels is not None:
        packages = folder / "packages"
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(packages)
        paths.append(str(packages))
    if before := os.environ.get("PYTHONPATH"):
        paths.append(before)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TORCHDYNAMO_DISABLE": "1"}
    # one thread: several spin against each other where a machine is busy
    return {"OMP_NUM_THREADS": "1", **environment, "CUDA_VISIBLE_DEVICES": ""} if on_cpu else environment


def _taken(words: list[str], option: str) -> str:
    at = words.index(option)
    value = words[at + 1] if at + 1 < len(words) else ""
    del words[at : at + 2]
    return value


def _refused(text: str) -> int:
    print(f"gpu-check: {text}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
