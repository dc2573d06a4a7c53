"""Each attack really runs, is contained, is reported under its name, and leaves neither process nor file behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from recipes.sandbox import host
from recipes.sandbox.host import Limits, Outcome

ATTACKS = Path(__file__).with_name("attacks.py")
QUICK = Limits(seconds=15, memory_mb=512, disk_mb=16, processes=8)
SHORT = Limits(seconds=2, memory_mb=256, disk_mb=16, processes=8)

missing = host.available()
if missing and (
    "a container needs" in missing[0] or not sys.platform.startswith("linux")
):  # a wall that fails is no reason to skip
    pytest.skip(f"no sandbox here: {missing}", allow_module_level=True)


def test_every_wall_stands() -> None:
    assert missing == []


def others_can_read(folder: str) -> bool:
    return all(path.stat().st_mode & 1 for path in (Path(folder).resolve(), *Path(folder).resolve().parents))


def attack(name: str, request: Any = None, limits: Limits = QUICK) -> Outcome:
    return host.run(f"{ATTACKS}:{name}", request, limits)


def sandboxes() -> list[int]:
    """Processes of a sandbox that this process has started or that its caller has left, and what the attacks start."""
    script, found = str(Path(host.__file__).with_name("start.py")), []
    mine = {process.pid for process in psutil.Process().children(recursive=True)}
    for process in psutil.process_iter(["cmdline", "ppid", "status"]):
        line = " ".join(process.info["cmdline"] or ())
        left = script in line and (process.pid in mine or process.info["ppid"] == 1)
        if process.info["status"] != psutil.STATUS_ZOMBIE and (left or "time.sleep(987654)" in line):
            found.append(process.pid)
    return found


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Nothing is left: no process, no descriptor, no file in the shared places."""
    shared = [Path(p) for p in (tempfile.gettempdir(), "/dev/shm", "/var/tmp")]

    def traces() -> set[Path]:
        return {path for folder in shared if folder.is_dir() for path in folder.glob("*k3-attack*")}

    descriptors = len(os.listdir("/proc/self/fd"))
    yield
    assert sandboxes() == []
    assert traces() == set()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_what_is_allowed() -> None:
    assert attack("fine", {"a": [1, "é"]}) == Outcome({"a": [1, "é"]})
    assert attack("own_folder").value == "mine"
    assert attack("starts_programs").value == "42"
    assert attack("numpy_works").value == 64.0**3


@pytest.mark.parametrize("name", ["loop", "loop_that_ignores_signals", "patient_fork_bomb", "close_everything"])
def test_a_hang_ends_at_its_time(name: str) -> None:
    began = time.monotonic()
    outcome = attack(name, limits=SHORT)
    assert outcome.problem == ("crash" if name == "close_everything" and outcome.problem == "crash" else "timeout"), outcome
    assert time.monotonic() - began < SHORT.seconds + 8


@pytest.mark.parametrize("name", ["fork_bomb", "thread_bomb"])
def test_bombs_meet_the_limit_on_processes(name: str) -> None:
    assert attack(name).problem == "processes"


@pytest.mark.parametrize("name", ["allocate", "allocate_by_pieces"])
def test_memory(name: str) -> None:
    assert attack(name).problem == "memory"


def test_memory_of_all_processes_together_is_bounded() -> None:
    limits = Limits(seconds=3, memory_mb=128, processes=4)
    before = psutil.virtual_memory().available
    call = f"host.run({f'{ATTACKS}:allocate_in_every_process'!r}, None, host.{limits!r})"
    code = f"from recipes.sandbox import host; print({call}.problem)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.communicate()[0].strip() in ("timeout", "memory", "crash")
    assert psutil.virtual_memory().available > before - (4 << 30)


def test_memory_that_no_limit_counts_is_refused() -> None:
    assert attack("memory_that_no_limit_counts").value == []


def test_files_outside_its_folder(tmp_path: Path) -> None:
    existing = tmp_path / "run.yaml"
    existing.write_text("kept")
    tmp_path.chmod(0o777)
    existing.chmod(0o666)
    targets = [
        str(tmp_path / "new"),
        str(existing),
        "/tmp/k3-attack",
        "/dev/shm/k3-attack",
        "/var/tmp/k3-attack",
        "/k3-attack",
        str(ATTACKS),
    ]
    source = ATTACKS.read_text()
    for target in targets:
        assert attack("write", target).problem == "files", target
    assert attack("write_quietly", targets).value == []
    assert existing.read_text() == "kept"
    existing.unlink()
    visible = tmp_path / "attacks.py"  # which any user may write to, were it not bound read-only
    visible.write_text(source)
    visible.chmod(0o666)
    assert host.run(f"{visible}:write", str(visible), QUICK).problem == "files"
    assert host.run(f"{visible}:write_quietly", [str(visible)], QUICK).value == []
    assert visible.read_text() == source and list(tmp_path.iterdir()) == [visible] and ATTACKS.read_text() == source


@pytest.mark.parametrize("name", ["fill_disk", "fill_inodes"])
def test_disk(name: str) -> None:
    assert attack(name).problem == "files"


def test_network() -> None:
    with socket.socket() as tcp, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp, socket.socket(socket.AF_UNIX) as unix:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        port = tcp.getsockname()[1]
        udp.bind(("127.0.0.1", port))
        unix.bind("\0k3-attack")
        unix.listen()
        for listener in (tcp, udp, unix):
            listener.setblocking(False)
        for name, request in (("tcp", port), ("tcp_swallowed", port), ("udp", port), ("dns", None), ("abstract", "k3-attack")):
            assert attack(name, request).problem == "network", name
        assert attack("quiet_network", port).value == []
        for listener in (tcp, unix):
            with pytest.raises(BlockingIOError):
                listener.accept()
        with pytest.raises(BlockingIOError):
            udp.recv(10)


def test_output() -> None:
    assert attack("chatter").problem == "output"
    assert attack("huge_answer").problem in ("output", "memory")


def test_an_answer_cannot_be_forged() -> None:
    assert attack("forge").problem == "crash"


def test_daemons_do_not_outlive_it() -> None:
    assert attack("daemon").value == "started"  # and the fixture finds no process


def test_signals(tmp_path: Path) -> None:
    assert attack("kill_parent").problem == "signals"
    assert attack("kill_quietly", [os.getpid(), os.getppid()]).value == []


def test_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789")
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    with contextlib.ExitStack() as held:  # many files open: the descriptors that follow have high numbers
        for _ in range(300):
            descriptor = os.open(secret, os.O_RDONLY)
            held.callback(os.close, descriptor)
            os.set_inheritable(descriptor, True)
        found = attack(
            "secrets", [str(secret), str(tmp_path), str(ATTACKS.parents[3] / "pyproject.toml"), f"/proc/{os.getpid()}/environ"]
        ).value
    assert len([line for line in found if line.startswith("descriptor")]) == 1, found  # the pipe for results
    assert [line for line in found if not line.startswith("descriptor")] == []


def test_calls_that_would_open_the_walls() -> None:
    assert attack("calls").value == []


def test_it_ends_with_its_caller() -> None:
    call = f"host.run({f'{ATTACKS}:loop_that_ignores_signals'!r}, None, host.Limits(seconds=100))"
    code = f"from recipes.sandbox import host; {call}"
    caller = subprocess.Popen([sys.executable, "-c", code])
    try:
        deadline = time.monotonic() + 20
        while len(inside := psutil.Process(caller.pid).children(recursive=True)) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        caller.send_signal(signal.SIGKILL)
        caller.wait()
    assert psutil.wait_procs(inside, timeout=20)[1] == []


def test_where_no_namespace_can_be_made_it_says_so() -> None:
    root = ATTACKS.parents[3]
    entry = f"{ATTACKS}:sandbox_in_the_sandbox"  # whose filter refuses new namespaces, as that of a container does
    (missing,) = host.run(entry, None, QUICK, paths=[str(root / "recipes")], search=[str(root)]).value
    assert "unshare" in missing and "a container needs" in missing


@pytest.mark.skipif(
    os.geteuid() != 0 or not others_can_read(sys.base_prefix), reason="needs root and a Python that others can read"
)
def test_root_of_a_container_without_rights_is_bound_too() -> None:
    """Without CAP_SYS_ADMIN root becomes nobody before it makes its namespaces."""
    code = f"""
import ctypes, os, sys
if len(sys.argv) == 1:
    ctypes.CDLL(None).prctl(24, 21, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_SYS_ADMIN
    os.execv(sys.executable, [sys.executable, __file__, "again"])
from recipes.sandbox import host
print([host.run("{ATTACKS}:" + name, 0, host.Limits()).problem for name in ("fine", "fork_bomb")])
"""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(code)
        file.flush()
        done = subprocess.run(
            [sys.executable, file.name], capture_output=True, text=True, env={"PYTHONPATH": str(ATTACKS.parents[3])}
        )
    assert done.stdout.strip() == "[None, 'processes']", done.stderr
