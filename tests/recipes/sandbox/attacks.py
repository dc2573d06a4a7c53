"""What code may try. Each function is called inside the sandbox with a request; returning at all is success for the attacker."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

DESCRIPTORS = 1 << 16  # numbers that are tried: a caller with many files open hands on high ones


def fine(request: Any) -> Any:
    return request


def loop(_: Any) -> None:
    while True:
        pass


def loop_that_ignores_signals(_: Any) -> None:
    for number in range(1, 65):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    while True:
        pass


def fork_bomb(_: Any) -> None:
    while True:
        os.fork()


def patient_fork_bomb(_: Any) -> None:
    while True:
        with contextlib.suppress(OSError):
            os.fork()


def thread_bomb(_: Any) -> None:
    import threading

    while True:
        threading.Thread(target=time.sleep, args=(1000,)).start()


def allocate(_: Any) -> int:
    return len(bytearray(10 << 30))


def allocate_by_pieces(_: Any) -> None:
    kept = []
    while True:
        kept.append(b"x" * (16 << 20))


def allocate_in_every_process(_: Any) -> None:
    while True:
        with contextlib.suppress(OSError):
            if os.fork() == 0:
                with contextlib.suppress(MemoryError):
                    allocate_by_pieces(None)
                time.sleep(1000)


def memory_that_no_limit_counts(_: Any) -> list[str]:
    libc, got = ctypes.CDLL(None, use_errno=True), []
    if libc.memfd_create(b"x", 0) >= 0:
        got.append("memfd")
    if libc.shmget(0, 1 << 20, 0o1600) >= 0:
        got.append("shm")
    return got


def write(path: str) -> str:
    with open(path, "w") as file:
        return str(file.write("was here"))


def write_quietly(paths: list[str]) -> list[str]:
    """By system calls, which nothing in Python sees."""
    libc, done = ctypes.CDLL(None), []
    for path in paths:
        if libc.open(path.encode(), os.O_WRONLY | os.O_CREAT, 0o644) >= 0:
            done.append(path)
    return done


def own_folder(_: Any) -> str:
    Path("here.txt").write_text("mine")
    import tempfile

    with tempfile.NamedTemporaryFile("w") as file:
        file.write("mine, too")
    return Path("here.txt").read_text()


def fill_disk(_: Any) -> None:
    for number in range(1000):
        Path(f"{number}").write_bytes(bytes(8 << 20))


def fill_inodes(_: Any) -> None:
    for number in range(1 << 20):
        Path(f"{number}").touch()


def tcp(port: int) -> None:
    socket.create_connection(("127.0.0.1", port), timeout=2)


def tcp_swallowed(port: int) -> str:
    with contextlib.suppress(OSError):
        tcp(port)
    return "nothing happened"


def udp(port: int) -> None:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"secret", ("127.0.0.1", port))


def dns(_: Any) -> None:
    socket.getaddrinfo("example.com", 80)


def abstract(name: str) -> None:
    socket.socket(socket.AF_UNIX).connect("\0" + name)


def quiet_network(port: int) -> list[str]:
    """Past Python's audit: whatever gets through is returned."""
    libc, got = ctypes.CDLL(None), []
    address = socket.AF_INET.to_bytes(2, sys.byteorder) + port.to_bytes(2, "big") + bytes([127, 0, 0, 1]) + bytes(8)
    stream = libc.socket(socket.AF_INET, socket.SOCK_STREAM, 0)
    if stream >= 0 and libc.connect(stream, address, len(address)) == 0:
        got.append("tcp")
    datagram = libc.socket(socket.AF_INET, socket.SOCK_DGRAM, 0)
    if datagram >= 0 and libc.sendto(datagram, b"x", 1, 0, address, len(address)) > 0:
        got.append("udp")
    for family in (16, 40, 38, 17):  # netlink, vsock, alg, packet
        if libc.socket(family, socket.SOCK_RAW, 0) >= 0 or libc.socket(family, socket.SOCK_STREAM, 0) >= 0:
            got.append(f"family {family}")
    return got


def close_everything(_: Any) -> None:
    os.closerange(0, DESCRIPTORS)
    time.sleep(1000)


def chatter(_: Any) -> None:
    line = b"y" * (1 << 20)
    while True:
        os.write(1, line)


def forge(_: Any) -> None:
    for descriptor in range(3, DESCRIPTORS):
        with contextlib.suppress(OSError):
            os.write(descriptor, b'{"value": 1, "token": "guess"}\n')
    os._exit(0)


def huge_answer(_: Any) -> str:
    return "x" * (64 << 20)


def daemon(_: Any) -> str:
    """A grandchild in a session of its own that would outlive this."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(987654)"])
        os._exit(0)
    time.sleep(0.2)
    return "started"


def kill_parent(_: Any) -> str:
    os.kill(os.getppid(), signal.SIGKILL)
    return "survived"


def kill_quietly(processes: list[int]) -> list[int]:
    libc = ctypes.CDLL(None)
    libc.kill(1, signal.SIGKILL)
    libc.kill(1, signal.SIGSTOP)
    return [p for p in processes if libc.kill(p, signal.SIGKILL) == 0 and p != 1]


def secrets(paths: list[str]) -> list[str]:
    found = [f"{name}={value}" for name, value in os.environ.items() if "KEY" in name or "SECRET" in name]
    for path in [
        *paths,
        "/proc/1/environ",
        f"/proc/{os.getppid()}/environ",
        "/proc/self/environ",
        "/etc/shadow",
    ]:
        with contextlib.suppress(OSError):
            found.append(path + str(os.listdir(path) if os.path.isdir(path) else Path(path).read_bytes()[:20]))
    for descriptor in range(3, DESCRIPTORS):
        with contextlib.suppress(OSError):
            found.append(f"descriptor {descriptor}: {os.fstat(descriptor).st_mode:o}")
    return found


def calls(_: Any) -> list[str]:
    """System calls that would open the walls."""
    libc, got = ctypes.CDLL(None, use_errno=True), []
    if libc.ptrace(16, 1, 0, 0) == 0:
        got.append("ptrace")
    for name, flag in (("user", 0x10000000), ("mount", 0x20000)):
        if libc.unshare(flag) == 0:
            got.append(f"unshare {name}")
    if libc.mount(b"none", b"/box", b"tmpfs", 0, None) == 0:
        got.append("mount")
    if libc.mount(None, b"/usr", None, 32 | 4096, None) == 0:
        got.append("remount")
    if libc.setuid(0) == 0 or os.geteuid() == 0:
        got.append("root")
    if libc.syscall(56 if os.uname().machine == "x86_64" else 220, 0x10000000 | 17, 0, 0, 0, 0) > 0:
        got.append("clone into a user namespace")
    with contextlib.suppress(OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_NPROC, (10000, 10000))
        got.append("limits")
    return got


def starts_programs(_: Any) -> str:
    done = subprocess.run([sys.executable, "-S", "-c", "print(6 * 7)"], capture_output=True, text=True)
    return done.stdout.strip() or done.stderr[-300:]


def numpy_works(_: Any) -> float:
    import numpy

    return float((numpy.ones((64, 64)) @ numpy.ones((64, 64))).sum())


def sandbox_in_the_sandbox(_: Any) -> list[str]:
    from recipes.sandbox import host

    return host.available()
