"""Building a folder so that its name never stands for half of it: built beside its place, renamed when whole."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)


@contextmanager
def lock(folder: Path) -> Iterator[bool]:
    """Waits until no other process of this machine prepares `folder`. Yields false where the file system has no locks."""
    with folder.with_name(f".{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except BlockingIOError:
            log.info("data: another process is preparing %s; waiting for it", folder)
            fcntl.flock(file, fcntl.LOCK_EX)
            alone = True
        except OSError:
            alone = False
        yield alone  # closing the file unlocks


@contextmanager
def workshop(folder: Path) -> Iterator[Path]:
    here = folder.with_name(f".{folder.name}.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:6]}.tmp")
    here.mkdir()
    try:
        yield here
    finally:
        shutil.rmtree(here, ignore_errors=True)  # gone already if it was published


def clear_debris(folder: Path) -> None:
    """Removes what killed preparations of this folder left behind: this machine's, of processes that are no more."""
    mine = re.compile(re.escape(f".{folder.name}.{socket.gethostname()}.") + r"(\d+)\.\w+\.tmp(\.damaged)?")
    for path in folder.parent.iterdir():
        if (match := mine.fullmatch(path.name)) and not _alive(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
