"""Looks from inside whether the walls stand; host.available asks. Only the standard library."""

from __future__ import annotations

import ctypes
import os
import resource
import socket


def look(_: object) -> list[str]:
    """What is missing."""
    missing = []
    if os.getppid() != 1:
        missing.append("a process namespace")
    if os.path.exists("/proc/self") or os.path.exists("/home") or os.path.exists("/sys/kernel"):
        missing.append("a mount namespace")
    if [name for _, name in socket.if_nameindex() if name != "lo"] if _can_list() else False:
        missing.append("a network namespace")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(0, 0, 0, 0) == 0:
        missing.append("seccomp")
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_NPROC):
        if resource.getrlimit(kind)[0] == resource.RLIM_INFINITY:
            missing.append("limits")
    if os.geteuid() == 0:
        missing.append("a user without rights")
    return missing


def _can_list() -> bool:
    try:
        socket.if_nameindex()
    except OSError:  # asked through a kind of socket that the filter refuses
        return False
    return True
