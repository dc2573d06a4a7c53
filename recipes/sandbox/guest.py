"""Inside the sandbox: loads a function, calls it, writes what it returns. Only the standard library.

Each line of the result pipe is an object: {"note": [kind, text]} when the code tries what is forbidden, {"value": ...} or
{"failed": [kind, text]} for a call. What must not be forged carries the call's token.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_NETWORK = {"socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname"}
_CHANGES = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown"}
_SHOWN = 300  # characters of an error that are kept


def run(given: dict[str, Any], result: int) -> None:
    """One call for each request: the one in `given`, or with given["serve"] a line of stdin each."""
    me = os.getpid()
    box = given["box"]

    def say(line: dict[str, Any]) -> None:
        os.write(result, json.dumps(line).encode() + b"\n")

    def refuse(error: BaseException) -> None:
        if os.getpid() != me:  # a copy of this process that the code has forked
            os._exit(1)
        say({"failed": [_kind(error), f"{type(error).__name__}: {error}"[:_SHOWN]]})

    sys.path[:] = [*given["search"], *(path for path in sys.path if path != sys.argv[3])]
    sys.dont_write_bytecode = True
    for name in [name for name in sys.modules if name.split(".")[0] == "recipes"]:
        del sys.modules[name]
    _watch(say, box, set(given["paths"]))
    try:
        function = load(given["function"])
        if given["setup"] is not None:
            function = function(given["setup"])
        if not given["serve"]:
            _call(function, given["request"], given["token"], say, refuse, me)
            return
        say({"value": "ready"})
    except BaseException as error:
        refuse(error)
        return
    for line in sys.stdin:
        request = json.loads(line)
        _call(function, request["request"], request["token"], say, refuse, me)


def _call(function: Callable[[Any], Any], request: Any, token: str, say: Any, refuse: Any, me: int) -> None:
    try:
        value = function(request)
        if os.getpid() != me:
            os._exit(1)
        line = {"value": value, "token": token}
        json.dumps(line)
    except BaseException as error:  # SystemExit and KeyboardInterrupt, too: it must not end as if all were well
        refuse(error)
        return
    say(line)


def load(name: str) -> Callable[[Any], Any]:
    """The function `package.module:function` or `/folder/file.py:function`."""
    place, _, function = name.rpartition(":")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location("plug_in_" + os.path.basename(place)[:-3], place)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    return getattr(module, function)


def _kind(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, BlockingIOError) or (isinstance(error, RuntimeError) and "start new thread" in str(error)):
        return "processes"
    if isinstance(error, OSError):
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EROFS, errno.EDQUOT):
            return "files"
        if error.errno == errno.ENOMEM:
            return "memory"
    return "crash"


def _watch(say: Callable[[dict[str, Any]], None], box: str, given: set[str]) -> None:
    """Notes what the code tries, though the walls stop it anyway and code that means harm can hide it from here."""
    noted: set[str] = set()

    def note(kind: str, text: str) -> None:
        if kind not in noted:
            noted.add(kind)
            say({"note": [kind, text[:_SHOWN]]})

    def outside(path: Any) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        full = os.path.abspath(os.fsdecode(path))
        return full != box and not full.startswith((box + "/", "/dev/null", "/dev/tty"))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _NETWORK:
            note("network", f"{event} {arguments[1:] if event.startswith('socket.') else ''}")
        elif event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES and outside(arguments[0]):
            note("files", f"open {arguments[0]!r}")
        elif event in _CHANGES and outside(arguments[0]):
            note("files", f"{event} {arguments[0]!r}")
        elif event == "os.kill" and arguments[0] in (1, -1):
            note("signals", f"os.kill{arguments}")

    sys.addaudithook(hook)
