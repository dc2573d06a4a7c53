"""The system calls that code in the sandbox cannot make: a seccomp filter, by prctl. Only the standard library, from its inside.

Namespaces and limits contain by themselves; this takes away ways around them (new namespaces and mounts, other processes' memory,
memory that no limit counts) and parts of the kernel that no reward needs.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

_X86 = {
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "pidfd_getfd": 438, "process_madvise": 440,
    "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161,
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442,
    "name_to_handle_at": 303, "open_by_handle_at": 304,
    "memfd_create": 319, "memfd_secret": 447, "shmget": 29, "shmat": 30, "shmctl": 31, "semget": 64, "msgget": 68, "mq_open": 240,
    "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "add_key": 248, "request_key": 249, "keyctl": 250,
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "init_module": 175, "delete_module": 176, "finit_module": 313, "kexec_load": 246, "kexec_file_load": 320,
    "swapon": 167, "reboot": 169,
}  # fmt: skip
_ARM = {
    "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "pidfd_getfd": 438, "process_madvise": 440,
    "unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51,
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442,
    "name_to_handle_at": 264, "open_by_handle_at": 265,
    "memfd_create": 279, "memfd_secret": 447, "shmget": 194, "shmat": 196, "shmctl": 195, "semget": 190, "msgget": 186,
    "mq_open": 180, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "add_key": 217, "request_key": 218, "keyctl": 219,
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "init_module": 105, "delete_module": 106, "finit_module": 273, "kexec_load": 104, "kexec_file_load": 294,
    "swapon": 224, "reboot": 142,
}  # fmt: skip
# machine: (AUDIT_ARCH, clone, clone3, socket, refused)
MACHINES = {"x86_64": (0xC000003E, 56, 435, 41, _X86), "aarch64": (0xC00000B7, 220, 435, 198, _ARM)}

_NAMESPACES = 0x7E020000  # CLONE_NEW* that clone takes: user, pid, net, ipc, uts, cgroup, mount
_FAMILIES = (1, 2, 10)  # unix and internet sockets lie in the sandbox's own network; vsock and others would not
_LOAD, _JEQ, _JGE, _JSET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCH, _ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; the low half of the first argument
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2


def program(machine: str) -> bytes:
    """The filter as an array of struct sock_filter."""
    arch, clone, clone3, socket, refused = MACHINES[machine]

    def step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("=HBBI", code, yes, no, value)

    def fail(number: int) -> bytes:
        return step(_RETURN, _ERRNO | number)

    steps = [step(_LOAD, _ARCH), step(_JEQ, arch, yes=1), step(_RETURN, _KILL), step(_LOAD, _NUMBER)]
    steps += [step(_JGE, 0x40000000, no=1), fail(errno.ENOSYS)]  # the x32 numbers of x86_64
    steps += [step(_JEQ, clone3, no=1), fail(errno.ENOSYS)]  # its flags lie in memory: callers fall back to clone
    for number in refused.values():
        steps += [step(_JEQ, number, no=1), fail(errno.EPERM)]
    steps += [step(_JEQ, clone, no=4), step(_LOAD, _ARGUMENT), step(_JSET, _NAMESPACES, no=1), fail(errno.EPERM)]
    steps += [step(_RETURN, _ALLOW)]
    count = len(_FAMILIES)
    steps += [step(_JEQ, socket, no=count + 2), step(_LOAD, _ARGUMENT)]
    steps += [step(_JEQ, family, yes=count - i) for i, family in enumerate(_FAMILIES)]
    steps += [fail(errno.EAFNOSUPPORT), step(_RETURN, _ALLOW)]
    return b"".join(steps)


def apply() -> None:
    """Binds this process and all that it starts. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    code = program(platform.machine())
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    for name, arguments in (
        ("PR_SET_NO_NEW_PRIVS", (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)),
        ("PR_SET_SECCOMP", (_PR_SET_SECCOMP, _MODE_FILTER, header, 0, 0)),
    ):
        if libc.prctl(*arguments):
            number = ctypes.get_errno()
            raise OSError(number, f"prctl({name}): {errno.errorcode.get(number, number)}")
