"""What surrounds the code in the sandbox: namespaces, a file system of its own, limits. Only the standard library.

The code sees read-only copies of the system's programs, of Python and of the folders it was given, one writable folder in memory
(/box), no /proc, no network device, no process but its own. All of it ends with the first process, the init of its namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import struct
from typing import Any

NOBODY = 65534
BOX = "/box"  # the one folder that can be written to
_SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_MNT_DETACH, _AT_FDCWD, _AT_RECURSIVE = 2, -100, 0x8000
_SYS_MOUNT_SETATTR = 442
_SYS = {"x86_64": {"pivot_root": 155, "capset": 126}, "aarch64": {"pivot_root": 41, "capset": 91}}
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {errno.errorcode.get(number, number)}")


def separate() -> None:
    """Takes this process out of the machine's namespaces; its next child is the init of a new one. Raises OSError.

    Root can do so as itself and gives its rights up in `drop`; it must not be root in a new user namespace, where what root owns
    outside would still be its own and no limit on processes would bind it.
    """
    kinds = os.CLONE_NEWNS | os.CLONE_NEWPID | os.CLONE_NEWNET | os.CLONE_NEWIPC | os.CLONE_NEWUTS
    if os.geteuid() == 0:
        try:
            os.unshare(kinds)
            return
        except PermissionError:
            _become_nobody()
    _own_users(kinds)


def _own_users(kinds: int) -> None:
    user, group = os.geteuid(), os.getegid()
    try:
        os.unshare(os.CLONE_NEWUSER | kinds)
    except OSError as error:
        raise OSError(error.errno, f"unshare (user namespaces): {error.strerror}") from error
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # else /proc/self is root's


def die_with_parent() -> None:
    """Raises OSError. A change of user undoes it."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind)]
    _checked(_libc.mount(*words, ctypes.c_ulong(flags), options.encode() if options else None), f"mount {target}")


def enclose(paths: list[str], disk_mb: int, machine: str) -> None:
    """A root of its own for this process: `paths` read-only where they were, and an empty /box of `disk_mb` MB, which it enters.

    Raises OSError. Nothing of it is seen outside the mount namespace, nor does it outlive it.
    """
    new = "/sys"  # covered by the new root while that is built; no source lies below it
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("sandbox", new, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    devices = [device for device in _DEVICES if os.path.exists(device)]
    bound: list[str] = []
    for path in [*_SYSTEM, *devices, *sorted(paths)]:
        if any(path == b or path.startswith(b.rstrip("/") + "/") for b in bound) or not os.path.lexists(path):
            continue
        target = new + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(path) and path in _SYSTEM:  # /lib -> usr/lib
            os.symlink(os.readlink(path), target)
            continue
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        _mount(path, target, None, _MS_BIND | _MS_REC)
        bound.append(path)
    os.makedirs(new + BOX)
    os.chdir(new)
    _checked(_libc.syscall(_SYS[machine]["pivot_root"], b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir("/")
    _read_only(["/", *bound])
    _mount("sandbox", BOX, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={disk_mb}m,nr_inodes=16384,mode=1777")
    os.chdir(BOX)


def _read_only(mounts: list[str]) -> None:
    attributes = struct.pack("=QQQQ", 1 | 2, 0, 0, 0)  # MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID
    if not _libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, len(attributes)):
        return
    if ctypes.get_errno() != errno.ENOSYS:
        _checked(-1, "mount_setattr")
    for path in mounts:  # before Linux 5.12: each by itself, keeping the flags that must not be taken away
        kept = os.statvfs(path).f_flag & (2 | 4 | 8 | 1024 | 2048)
        _mount(None, path, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | kept)


def drop(machine: str) -> None:
    """Gives up root and every capability. Raises OSError."""
    if os.geteuid() == 0:
        _become_nobody()
        try:
            os.unshare(os.CLONE_NEWUSER)  # so that the limit on processes counts these alone
        except OSError:
            pass  # it then counts all that nobody has: stricter
    header, none = struct.pack("=II", 0x20080522, 0), bytes(24)
    _checked(_libc.syscall(_SYS[machine]["capset"], header, none), "capset")


def limit(limits: dict[str, Any]) -> None:
    """rlimits of this process and each that it starts. After `drop`: they do not bind root."""
    megabyte = 1 << 20
    for kind, value in (
        (resource.RLIMIT_AS, limits["memory_mb"] * megabyte),
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_FSIZE, limits["disk_mb"] * megabyte),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        if value is not None:
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))


def offer_to_oom() -> None:
    """Offers this process first where the machine runs out of memory all the same."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
