"""`k3 doctor`: what is here, which kernels will run, and what to install for the others; `k3 doctor wandb`: where metrics go.

One line a component: ok, `-` (absent, and nothing needs it) or `!` (something is wrong). Nothing is changed or sent.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes import dashboard
from recipes.config import WandbMode
from recipes.console import say
from recipes.errors import UserError, suggestion
from recipes.precision import INSTALL, found, unfit

PATIENCE = 5.0  # seconds for a program of the machine to answer
OK, ABSENT, WRONG = "ok", "-", "!"


@dataclass(frozen=True)
class Line:
    component: str
    state: str
    text: str


def run(words: Sequence[str]) -> int:
    """Prints a line a component. Exit code 0: what is absent is a fact, not a failure."""
    topics = {"": everything, "wandb": wandb}
    topic = words[0] if words else ""
    if len(words) > 1 or topic not in topics:
        wrong = words[-1]
        raise UserError(f"{wrong}: no such topic{suggestion(wrong, ['wandb'])}; give wandb, or nothing for all but its details")
    for line in topics[topic]():
        say(f"{line.state:<3} {line.component:<20} {line.text}")
    return 0


def everything() -> Iterator[Line]:
    yield python()
    yield from hardware()
    yield package("megatron-core", "megatron.core")
    yield package("emerging-optimizers", "emerging_optimizers")
    yield package("triton", "triton", otherwise="comes with torch on Linux; the GPU kernels of fla-core need it")
    yield package("fla-core", "fla", otherwise='KDA on GPUs: EXTRAS="test gpu" make install')
    yield transformer_engine()
    yield apex()
    yield package("deepspeed", "deepspeed", otherwise='only for optim.offload=cpu: EXTRAS="test deepspeed" make install')
    yield slurm()
    yield next(iter(wandb()))
    yield sandbox()
    yield from kernels()
    yield from precisions()


def sandbox() -> Line:
    from recipes.sandbox import host

    missing = host.available()
    return Line("sandbox", ABSENT if missing else OK, "; ".join(missing) or "rewards that run foreign code are contained")


def python() -> Line:
    fits = (3, 12) <= sys.version_info[:2] < (3, 14)
    version = ".".join(map(str, sys.version_info[:3]))
    return Line("python", OK if fits else WRONG, f"{version} {sys.executable}" + ("" if fits else "; needs 3.12 or 3.13"))


def hardware() -> Iterator[Line]:
    import torch

    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    yield package("torch", "torch", also=built)
    driver = answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    there = torch.cuda.is_available()
    if driver is None:
        yield Line("driver", ABSENT, "no nvidia-smi here: this machine runs everything on the CPU")
    else:
        yield Line(
            "driver", OK if there else WRONG, driver + ("" if there else "; torch sees no device: is the driver too old for it?")
        )
    for number in range(torch.cuda.device_count() if there else 0):
        gpu = torch.cuda.get_device_properties(number)
        yield Line(
            f"gpu {number}", OK, f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"
        )
    if not there:
        yield Line("gpu", ABSENT, "none")
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda and torch.distributed.is_nccl_available() else None
    use = "processes talk through it" if there else "unused without GPUs: processes talk through gloo"
    yield Line("nccl", OK, f"{nccl}; {use}") if nccl else Line("nccl", ABSENT, "not in this torch; processes talk through gloo")


def package(name: str, module: str, *, otherwise: str = "make install", also: str = "") -> Line:
    """By its metadata: importing them all would take a minute."""
    try:
        there = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Line(name, WRONG if required(name) else ABSENT, f"not installed; {otherwise}")
    if importlib.util.find_spec(module.split(".")[0]) is None:
        return Line(name, WRONG, f"{there} is listed as installed and has no module {module}; {otherwise}")
    wanted = pin(name)
    if wanted is not None and there.split("+")[0] != wanted:
        return Line(name, WRONG, f"{there}; this project is written for {wanted} exactly: make install")
    return Line(name, OK, there + (f", {also}" if also else ""))


def requirements() -> list[str]:
    try:
        return importlib.metadata.requires("k3-training") or []
    except importlib.metadata.PackageNotFoundError:  # run from a copy of the sources
        return []


def required(name: str) -> bool:
    return any(re.match(rf"{re.escape(name)}\b", r) and "extra ==" not in r for r in requirements())


def pin(name: str) -> str | None:
    exact = (re.match(rf"{re.escape(name)}==([\w.]+)", r) for r in requirements())
    return next((match[1] for match in exact if match), None)


def transformer_engine() -> Line:
    line = package("transformer-engine", "transformer_engine", otherwise=f"for precision=fp8|mxfp8: {INSTALL}")
    if line.state is not OK:
        return line
    import torch

    if not torch.cuda.is_available():
        return Line(line.component, ABSENT, f"{line.text}; hidden from megatron-core, because it needs a GPU")
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception as error:  # its CUDA part raises RuntimeError and others
        return Line(line.component, WRONG, f"{line.text}, and its import fails ({type(error).__name__}: {error}); {INSTALL}")
    return line


def apex() -> Line:
    """NVIDIA's has `amp_C`, which is compiled, and apex.multi_tensor_apply; the package index's `apex` has neither."""
    why = "optional, a fused AdamW on GPUs: build NVIDIA's from its source; `pip install apex` brings another project"
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return Line("apex", ABSENT, f"not installed ({why})")
    nvidia = any((Path(folder) / "multi_tensor_apply").is_dir() for folder in spec.submodule_search_locations or ())
    if not nvidia:
        return Line(
            "apex", WRONG, "another project of that name, which megatron-core would take for NVIDIA's: pip uninstall apex"
        )
    if importlib.util.find_spec("amp_C") is None:
        return Line("apex", WRONG, "NVIDIA's, without its CUDA part (no amp_C): build it with --cpp_ext --cuda_ext")
    return Line("apex", OK, "NVIDIA's")


def slurm() -> Line:
    if shutil.which("sbatch") is None:
        return Line("slurm", ABSENT, "no sbatch here: jobs cannot be submitted from this machine")
    version = answer("sinfo", "--version")
    return Line("slurm", OK, version) if version else Line("slurm", WRONG, "sbatch is here, and `sinfo --version` fails")


def wandb() -> Iterator[Line]:
    """The first line is the summary."""
    version = package("wandb", "wandb")
    if version.state is not OK:
        yield version
        return
    mode = dashboard.wanted_mode(WandbMode.auto)
    means = {
        WandbMode.online: "metrics are sent",
        WandbMode.offline: "metrics stay in the run folder",
        WandbMode.disabled: "none are kept",
    }
    yield Line("wandb", OK, f"{version.text}, wandb.mode=auto is {mode.value} here: {means[mode]} (k3 doctor wandb)")
    yield from _wandb_details(mode, dashboard.base_url(), dashboard.has_key())


def _wandb_details(mode: object, url: str, key: bool) -> Iterator[Line]:
    where = "WANDB_API_KEY or the netrc file"
    yield Line(
        "wandb key", OK if key else ABSENT, f"found for {url} in {where}" if key else f"none in {where}: `wandb login` sets one"
    )
    reached = dashboard.answers(url)
    silent = f"does not answer within {dashboard.PATIENCE:.0f} s: a run that wants it goes on offline"
    text = f"{url} {'answers' if reached else silent}"
    yield Line("wandb server", OK if reached else ABSENT, text)
    yield Line("wandb offline", OK, "runs/NAME/wandb/offline-run-*, beside metrics.jsonl, which is written in every mode")
    yield Line("wandb sync", OK, "wandb sync runs/NAME/wandb/offline-run-*  sends them later; a resumed run's parts become one")


def kernels() -> Iterator[Line]:
    """Asks the dispatchers with tensors like a model's: bfloat16 on a GPU, else float32."""
    import torch

    from kernels import attention, experts, kda
    from kernels.dispatch import survey
    from kernels.newton_schulz.batched import BACKENDS as newton_schulz
    from optim import adamw_kernels
    from optim.config import Offload

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def like(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=of, device=device)

    heads = like(1, 128, 2, 128)
    counts = torch.full((2,), 8, device=device)
    for name, backends, given in (
        ("kda", kda.BACKENDS, (heads, heads, heads)),
        ("attention", attention.BACKENDS, (like(1, 128, 2, 192), like(1, 128, 2, 192), heads)),
        ("experts", experts.BACKENDS, (like(16, 64), counts, like(2, 64, 64), like(2, 64, 32))),
        ("newton-schulz", newton_schulz, (like(1, 512, 512, of=torch.float32),)),
        ("adamw", adamw_kernels.BACKENDS, (Offload.none, [(device, torch.float32)], False)),
    ):
        backend, refusals = survey(backends, *given)  # type: ignore[arg-type]
        text = (backend.name if backend else "none") + (f" ({'; '.join(refusals)})" if refusals else "")
        yield Line(f"kernel {name}", OK if backend else WRONG, f"{text} [{str(dtype)[6:]} on {device.type}]")


def precisions() -> Iterator[Line]:
    from k3.low_precision import LowPrecision

    for kind in LowPrecision:
        reason = unfit(kind, *found(kind))
        yield Line(f"precision {kind.value}", ABSENT if reason else OK, reason or "Transformer Engine and this GPU can")


def answer(program: str, *words: str) -> str | None:
    """The first line that a program of this machine prints, or None where it is not there, fails or hangs."""
    if shutil.which(program) is None:
        return None
    try:
        done = subprocess.run([program, *words], capture_output=True, text=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None
