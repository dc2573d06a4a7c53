"""The sandbox's own processes; host.py starts this file. Only the standard library: it must be up in milliseconds.

outer   in the caller's namespaces, watches the caller: ends the sandbox when its end of the pipe closes, by whatever cause
init    process 1 inside: builds the walls, gives up its rights; all others die with it
guest   runs the foreign code (guest.py)
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from typing import Any, NoReturn

BROKEN_WALL = 97  # exit code: the sandbox could not be built; why is on stderr


def main() -> NoReturn:
    caller, result = int(sys.argv[1]), int(sys.argv[2])
    sys.path.insert(0, sys.argv[3])
    size = int.from_bytes(_exactly(caller, 8), "big")
    given = json.loads(_exactly(caller, size))
    from recipes.sandbox import walls

    try:
        walls.offer_to_oom()
        walls.separate()
    except OSError as error:
        _broken(error)
    started, go = os.pipe()
    init = os.fork()
    if init == 0:
        os.close(go)
        os.close(caller)
        _init(given, started, result)
    os.close(result)
    for stream in (0, 1, 2):
        os.close(stream)
    os.close(started)
    os.write(go, b"1")
    _watch(init, caller)


def _exactly(descriptor: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = os.read(descriptor, count - len(data))
        if not more:
            os._exit(0)  # the caller has gone
        data += more
    return data


def _broken(error: Exception) -> NoReturn:
    os.write(2, f"{error}\n".encode())
    os._exit(BROKEN_WALL)


def _watch(init: int, caller: int) -> NoReturn:
    """Ends with init's exit code, or ends init when the caller has gone."""
    poll = select.poll()
    ended = os.pidfd_open(init)
    poll.register(caller, select.POLLIN)
    poll.register(ended, select.POLLIN)
    if any(descriptor == caller for descriptor, _ in poll.poll()):
        os.kill(init, signal.SIGKILL)
    status = os.waitpid(init, 0)[1]  # returns when every process of the namespace has ended
    os._exit(_code(status))


def _code(status: int) -> int:
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _init(given: dict[str, Any], started: int, result: int) -> NoReturn:
    from recipes.sandbox import filter, guest, walls

    machine = os.uname().machine
    try:
        walls.die_with_parent()
        walls.enclose(given["paths"], given["limits"]["disk_mb"], machine)
        walls.drop(machine)
        walls.die_with_parent()  # the change of user has undone it
        walls.limit(given["limits"])
    except OSError as error:
        _broken(error)
    if not os.read(started, 1):
        os._exit(0)
    os.close(started)
    # foreign code can neither signal process 1 nor read its memory, so its exit code is the truth about the guest
    child = os.fork()
    if child == 0:
        try:
            filter.apply()
        except OSError as error:
            _broken(error)
        guest.run(given, result)
        os._exit(0)
    os.close(result)
    for stream in (0, 1, 2):
        os.close(stream)
    while True:
        process, status = os.wait()
        if process == child:
            os._exit(_code(status))


if __name__ == "__main__":
    main()
