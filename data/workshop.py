"""Building a folder so that its name never stands for half of it: built beside its place, renamed when whole."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from data.errors import DataError

log = logging.getLogger(__name__)


def once[T](folder: Path, find: Callable[[], T | None], build: Callable[[Path], None], cache: str) -> T:
    """What `find` finds in `folder`; where it finds nothing, `build` makes it first, in a folder beside it that is then renamed.

    Raises DataError where `cache`, as the user typed it, cannot hold it.
    """
    if (done := find()) is not None:
        return done
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with lock(folder) as alone:
            if (done := find()) is not None:
                return done
            if alone:
                clear_debris(folder)
            with workshop(folder) as here:
                build(here)
                _publish(here, folder, find)
    except OSError as problem:
        raise DataError(f"data.cache={cache}: {problem}; give a folder that can be written to and has room") from problem
    if (done := find()) is None:
        raise DataError(f"data.cache={cache}: {folder} vanished while it was made; run again")
    return done


def _publish(here: Path, folder: Path, find: Callable[[], object]) -> None:
    if folder.exists() and find() is None:
        log.warning("data: %s is damaged; making it again", folder)
        folder.rename(here.with_name(here.name + ".damaged"))
        shutil.rmtree(here.with_name(here.name + ".damaged"), ignore_errors=True)
    try:
        here.rename(folder)
    except OSError:
        if find() is None:  # another process was first: what it made is the same
            raise


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
