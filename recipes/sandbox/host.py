"""Calls foreign functions in the sandbox: `run` for one call in a fresh process, `Served` for many in one that stays.

Whatever the code does, the caller gets an Outcome: a value, or a problem of one kind. Nothing of the sandbox is left, no process
and no file, when `run` or `Served.close` returns.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import select
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from recipes.sandbox import filter
from recipes.sandbox.start import BROKEN_WALL
from recipes.sandbox.walls import BOX

PROBLEMS = ("timeout", "memory", "processes", "network", "files", "signals", "output", "crash")
_ROOT = Path(__file__).parents[2]
_GRACE = 5.0  # seconds for the kernel to end everything in a sandbox
_MOST_RESULT = 1 << 20  # bytes that a call may return
_KEPT = 2000  # bytes of what it prints that are kept


_HINT = "a container needs CAP_SYS_ADMIN or user namespaces: user.max_user_namespaces above 0, kernel.unprivileged_userns_clone=1"


@dataclass(frozen=True)
class Limits:
    """Of one sandbox. Memory is a process's, and processes (threads count as such) are all: together they bound the whole."""

    seconds: float = 10.0  # of the clock, for one call
    memory_mb: int = 1024
    disk_mb: int = 64  # of its folder, which lies in memory
    processes: int = 8
    output_mb: int = 1  # of what it prints
    cpu_seconds: int | None = None  # of one process over its whole life


@dataclass(frozen=True)
class Outcome:
    """`value` is what the function returned, or `problem` (one of PROBLEMS) says why there is none and `detail` more of it."""

    value: Any = None
    problem: str | None = None
    detail: str = ""


class Broken(RuntimeError):
    """The sandbox itself cannot be built here. The message says what is missing."""


def available() -> list[str]:
    """What this machine lacks for the sandbox; nothing where it can be used. Takes some tens of milliseconds."""
    if not sys.platform.startswith("linux"):
        return [f"Linux; this is {sys.platform}"]
    if (machine := platform.machine()) not in filter.MACHINES:
        return [f"a processor of {', '.join(filter.MACHINES)}; this is {machine}"]
    try:
        outcome = run("recipes.sandbox.probe:look", None, Limits(seconds=30), search=[str(_ROOT)], paths=[str(_ROOT / "recipes")])
    except Broken as error:
        return [f"{error} ({_HINT})"]
    if outcome.problem:
        return [f"a sandbox that works: {outcome.problem}: {outcome.detail}"]
    return list(outcome.value)


@cache
def _python() -> list[str]:
    """What Python itself needs to see."""
    return sorted({os.path.realpath(p) for p in (sys.base_prefix, sys.prefix, *site_folders())} | {sys.prefix, sys.base_prefix})


@cache
def site_folders() -> list[str]:
    """Where installed packages lie."""
    known = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    return [
        p
        for p in dict.fromkeys([*sys.path, *known])
        if os.path.basename(p) in ("site-packages", "dist-packages") and os.path.isdir(p)
    ]


class _Process:
    def __init__(self, given: dict[str, Any], limits: Limits):
        self._limits = limits
        self._heard, self._printed, self._tail = b"", 0, b""
        self.notes: list[list[str]] = []
        from_caller, self._caller = os.pipe()
        self._result, to_caller = os.pipe()
        self._output, printed = os.pipe()
        environment = {
            "PATH": "/usr/bin:/bin", "HOME": BOX, "TMPDIR": BOX, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONUTF8": "1",
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MPLCONFIGDIR": BOX,
        }  # fmt: skip
        command = [sys.executable, "-S", "-P", "-B", str(Path(__file__).with_name("start.py"))]
        self.process = subprocess.Popen(
            [*command, str(from_caller), str(to_caller), str(_ROOT)],
            stdin=subprocess.PIPE, stdout=printed, stderr=printed, env=environment, start_new_session=True,
            cwd="/", pass_fds=(from_caller, to_caller),
        )  # fmt: skip
        for descriptor in (from_caller, to_caller, printed):
            os.close(descriptor)
        text = json.dumps({**given, "limits": asdict(limits)}).encode()
        self._send(self._caller, len(text).to_bytes(8, "big") + text)

    def _send(self, descriptor: int, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError:
            pass  # it has ended; the answer will say so

    def ask(self, request: Any, token: str) -> None:
        assert self.process.stdin
        self._send(self.process.stdin.fileno(), json.dumps({"request": request, "token": token}).encode() + b"\n")

    def answer(self, token: str | None, deadline: float) -> Outcome:
        """The value of one call, or the problem. Raises Broken."""
        poll = select.poll()
        open_ends = {self._result, self._output}
        for descriptor in open_ends:
            poll.register(descriptor, select.POLLIN)
        while True:
            while b"\n" in self._heard:
                line, self._heard = self._heard.split(b"\n", 1)
                if outcome := self._judge(line, token):
                    return outcome
            left = deadline - time.monotonic()
            if left <= 0:
                return self._problem("timeout", f"no answer within {self._limits.seconds:g} s")
            if self._result not in open_ends:
                return self._ended(deadline)
            for descriptor, _ in poll.poll(left * 1000 + 1):
                data = os.read(descriptor, 1 << 16)
                if not data:
                    poll.unregister(descriptor)
                    open_ends.discard(descriptor)
                elif descriptor == self._result:
                    self._heard += data
                    if len(self._heard) > _MOST_RESULT:
                        return self._problem("output", f"returned over {_MOST_RESULT} bytes")
                else:
                    self._printed += len(data)
                    self._tail = (self._tail + data)[-_KEPT:]
                    if self._printed > self._limits.output_mb << 20:
                        return self._problem("output", f"printed over {self._limits.output_mb} MB")

    def _judge(self, line: bytes, token: str | None) -> Outcome | None:
        try:
            said = json.loads(line)
            if "note" in said:
                self.notes.append([str(said["note"][0]), str(said["note"][1])])
                return None
            if "failed" in said:
                return self._problem(str(said["failed"][0]), str(said["failed"][1]))
            if said.get("token") != token:
                return self._problem("crash", "an answer that the caller did not ask for")
            return self._problem(*self.notes[0]) if self.notes else Outcome(said["value"])
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return self._problem("crash", "wrote to the pipe of results")

    def _problem(self, kind: str, detail: str) -> Outcome:
        if self.notes and kind != self.notes[0][0]:
            kind, detail = self.notes[0][0], f"{self.notes[0][1]}; then {kind}: {detail}"
        return Outcome(problem=kind if kind in PROBLEMS else "crash", detail=detail)

    def _ended(self, deadline: float) -> Outcome:
        code = self._wait(min(deadline, time.monotonic() + _GRACE))
        while select.select([self._output], [], [], 0)[0] and (data := os.read(self._output, 1 << 16)):
            self._tail = (self._tail + data)[-_KEPT:]
        printed = self._tail.decode(errors="replace").strip()
        if code == BROKEN_WALL:
            raise Broken(printed)
        if code == 128 + signal.SIGXCPU:
            return self._problem("timeout", "used up its processor time")
        if code is not None and code > 128:
            name = signal.Signals(code - 128).name if code - 128 in {s.value for s in signal.Signals} else f"signal {code - 128}"
            return self._problem("crash", f"ended by {name}. {printed[-300:]}")
        return self._problem("crash", f"ended without an answer. {printed[-300:]}")

    def _wait(self, deadline: float) -> int | None:
        try:
            return self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Ends everything in the sandbox and waits until it has ended."""
        if self.process.returncode is None:
            os.close(self._caller)  # start.py then ends init, and with it all others
            if self._wait(time.monotonic() + _GRACE) is None:
                self.process.kill()  # init dies with it
                self.process.wait()
        else:
            os.close(self._caller)
        if self.process.stdin:
            try:
                self.process.stdin.close()
            except OSError:
                pass
        os.close(self._result)
        os.close(self._output)


def _given(function: str, paths: Sequence[str], search: Sequence[str], **more: Any) -> dict[str, Any]:
    place = function.rpartition(":")[0]
    own = [os.path.realpath(place)] if place.endswith(".py") else []
    visible = {*_python(), *map(os.path.abspath, paths), *own, *([os.path.abspath(place)] if own else [])}
    return {"function": function, "paths": sorted(visible), "search": [*search, *site_folders()], "box": BOX, **more}


def run(
    function: str,
    request: Any,
    limits: Limits,
    *,
    paths: Sequence[str] = (),
    search: Sequence[str] = (),
    setup: str | None = None,
) -> Outcome:
    """`function` (`module:name` or `/folder/file.py:name`) of `request`, which like the result is JSON, in a sandbox of its own.

    paths: files and folders it may read. search: of those, where to look for modules. setup: `function` is called with it first,
    and what that returns is the function. Raises Broken.
    """
    token = secrets.token_hex(16)
    deadline = time.monotonic() + limits.seconds
    process = _Process(_given(function, paths, search, serve=False, setup=setup, request=request, token=token), limits)
    try:
        return process.answer(token, deadline)
    finally:
        process.close()


class Served:
    """A function in a sandbox that stays, for many calls. After a problem that leaves it unusable it starts again by itself."""

    def __init__(
        self,
        function: str,
        limits: Limits,
        *,
        paths: Sequence[str] = (),
        search: Sequence[str] = (),
        setup: str | None = None,
        start_seconds: float = 300,
    ):
        self._given = _given(function, paths, search, serve=True, setup=setup)
        self._limits, self._start_seconds = limits, start_seconds
        self._process: _Process | None = None
        self._ready = False

    def start(self) -> None:
        """Begins to load the function; the first call waits for it."""
        if self._process is None:
            self._process, self._ready = _Process(self._given, self._limits), False

    def load(self) -> Outcome | None:
        """Waits until the function is loaded; what kept it from that, else None. Raises Broken."""
        self.start()
        assert self._process
        if not self._ready:
            loaded = self._process.answer(None, time.monotonic() + self._start_seconds)
            if loaded.problem:
                self.close()
                return loaded
            self._ready = True
        return None

    def call(self, request: Any) -> Outcome:
        """Raises Broken."""
        if failed := self.load():
            return failed
        assert self._process
        token = secrets.token_hex(16)
        self._process.notes.clear()
        self._process.ask(request, token)
        outcome = self._process.answer(token, time.monotonic() + self._limits.seconds)
        if outcome.problem:
            self.close()
        return outcome

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None
