"""The process environment that training is fast in, set before torch is imported.

glibc gives large buffers back to the kernel at every free, and the page faults of taking them again cost more than the
arithmetic (3.5x on residual mixing): its thresholds are read when the process starts, so the command starts itself once
more with them set. What the user has set already is left as it is.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",  # no buffer in a mapping of its own
    "MALLOC_TOP_PAD_": "268435456",  # grow the heap by 256 MiB at a time
    "MALLOC_TRIM_THRESHOLD_": "68719476736",  # and keep it
}
CHOSEN = "K3_CHOSEN"  # names the variables that were set here and not by the user


def settings(env: Mapping[str, str]) -> dict[str, str]:
    """The variables to add to `env`: those the user has not set and that have a meaning on this machine."""
    wanted: dict[str, str] = {}
    if platform.libc_ver()[0] == "glibc" and "LD_PRELOAD" not in env:  # a preloaded allocator has its own thresholds
        wanted |= ALLOCATOR
    if not sees_cuda(env):
        wanted["TORCHDYNAMO_DISABLE"] = "1"  # megatron-core compiles small functions at import: minutes of C++ for nothing
        # Idle threads spin briefly, then sleep. By default they spin so long that a step is ten times slower where another
        # process shares the cores; never spinning costs a third of the speed on a quiet machine.
        if "OMP_WAIT_POLICY" not in env:
            wanted["GOMP_SPINCOUNT"] = "10000"
    wanted["OMP_NUM_THREADS"] = str(physical_cores())
    return {name: value for name, value in wanted.items() if name not in env}


def ensure() -> None:
    """Starts this command again with `settings` in its environment, once; returns where nothing is missing.

    Does nothing where torch is already loaded: its threads and the allocator have taken their settings.
    """
    missing = settings(os.environ)
    if not missing or "torch" in sys.modules:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **missing, CHOSEN: ",".join(missing)})


def sees_cuda(env: Mapping[str, str]) -> bool:
    """Whether a CUDA device could be visible to torch, told without importing it."""
    if env.get("CUDA_VISIBLE_DEVICES", "unset") in ("", "-1"):
        return False
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()


def physical_cores() -> int:
    """Cores this process may run on, each counted once however many threads it has, within the container's quota."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cpus = os.sched_getaffinity(0)
    cores = {_core(cpu) for cpu in cpus}
    quota = _quota()
    return max(1, min(len(cores), quota) if quota else len(cores))


def _core(cpu: int) -> tuple[str, str]:
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        return (topology / "physical_package_id").read_text().strip(), (topology / "core_id").read_text().strip()
    except OSError:
        return "", str(cpu)


def _quota() -> int | None:
    """Whole cores of the cgroup's quota (version 2), or None where there is none."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else max(1, int(limit) // int(period))
    except (OSError, ValueError):
        return None
