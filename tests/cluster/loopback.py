"""A real Slurm on this one machine: munged, slurmctld and three slurmd on loopback addresses, as root and without systemd.

Each node has an address of its own (127.0.0.1, 127.0.0.2, 127.0.0.3), so that a job can be seen to meet at its first one, and a
pretended GPU: a device file without a device.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "squeue", "scancel")
NODES = 3

CONF = """\
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool.%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
MailProg=/bin/true
SwitchType=switch/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,bf_interval=1,sched_interval=1
MinJobAge=3600
KillWait=20
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
AccountingStorageType=accounting_storage/none
{nodes}
PartitionName=train Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=10 GraceTime=60 OverSubscribe=NO
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=100 OverSubscribe=NO PreemptMode=OFF
"""
NODE = (
    "NodeName=n{n} NodeHostname={host} NodeAddr=127.0.0.{n} Port={port} CPUs=4 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 "
    "ThreadsPerCore=1 RealMemory=4000 Gres=gpu:1 State=UNKNOWN"
)


class Unavailable(RuntimeError):
    """Why a real Slurm cannot run here."""


def install() -> None:
    """Raises Unavailable where this process may not install and run Slurm's daemons."""
    if os.geteuid() != 0:
        raise Unavailable("Slurm's daemons need root")
    os.environ["PATH"] = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
    if all(map(shutil.which, PROGRAMS)):
        return
    if shutil.which("apt-get") is None:
        raise Unavailable(f"{', '.join(PROGRAMS)} are not installed, and there is no apt-get to install them with")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", "install", "-y", "--no-install-recommends", *PACKAGES]
    for before in (None, ["apt-get", "update"]):  # the lists may be there; they may also be old
        if before:
            subprocess.run(before, env=quiet, capture_output=True, timeout=300)
        done = subprocess.run(command, env=quiet, capture_output=True, text=True, timeout=300)
        if done.returncode == 0:
            break
    if not all(map(shutil.which, PROGRAMS)):
        raise Unavailable(f"{' '.join(command)} failed: {' '.join((done.stderr or done.stdout).split())[-300:]}")


class Loopback:
    """The running cluster; `stop` ends it, by the pids of its own pid files."""

    def __init__(self, root: Path):
        self.root = root
        for name in ("munge", "state", "log", "dev"):
            (root / name).mkdir(parents=True)
        self._pids = [root / "slurmctld.pid", *(root / f"slurmd.n{n}.pid" for n in range(1, NODES + 1)), root / "munge/pid"]
        host = socket.gethostname().split(".")[0]
        control, *ports = _free_ports(1 + NODES)
        nodes = "\n".join(NODE.format(n=n, host=host, port=port) for n, port in enumerate(ports, 1))
        self.conf = root / "slurm.conf"
        self.conf.write_text(CONF.format(host=host, port=control, root=root, nodes=nodes))
        gpu = root / "dev/gpu0"
        os.mknod(gpu, 0o20666, os.makedev(1, 3))
        (root / "gres.conf").write_text(f"AutoDetect=off\nNodeName=n[1-{NODES}] Name=gpu File={gpu}\n")

    def start(self) -> None:
        key = self.root / "munge/key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        of = self.root / "munge"
        self._do(
            *("munged", "--force", f"--key-file={key}", f"--socket={of}/socket", f"--pid-file={of}/pid"),
            *(f"--log-file={self.root}/log/munged.log", f"--seed-file={of}/seed", "--num-threads=2"),
        )
        self._do("slurmctld", "-f", str(self.conf), "-c")
        for n in range(1, NODES + 1):
            (self.root / f"spool.n{n}").mkdir()
            self._do("slurmd", "-f", str(self.conf), "-N", f"n{n}")
        until(lambda: self.slurm("sinfo", "-h", "-N", "-p", "train", "-t", "idle").count("\n") == NODES, 30, "idle nodes")

    def stop(self) -> None:
        self.slurm("scancel", "--state=PENDING")
        self.slurm("scancel", "--state=RUNNING")
        running = [int(path.read_text()) for path in self._pids if path.is_file() and path.read_text().strip()]
        for pid in running:
            _kill(pid, 15)
        deadline = time.monotonic() + 10
        while any(_kill(pid, 0) for pid in running) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in running:
            _kill(pid, 9)

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.conf)}

    def slurm(self, *words: str) -> str:
        return subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=60).stdout

    def job(self, number: int) -> dict[str, str]:
        """What `scontrol show job` says about it."""
        return dict(w.split("=", 1) for w in self.slurm("scontrol", "-o", "show", "job", str(number)).split() if "=" in w)

    def wait(self, number: int, *states: str, seconds: float = 120) -> dict[str, str]:
        """Until the job is in one of these states."""
        until(lambda: self.job(number).get("JobState") in states, seconds, f"job {number} in {states}", lambda: self.job(number))
        return self.job(number)

    def _do(self, *words: str) -> None:
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise Unavailable(f"{words[0]} does not start: {done.stderr.strip()}")


def until(true: Callable[[], bool], seconds: float, what: str, more: Callable[[], object] = lambda: "") -> None:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise AssertionError(f"no {what} after {seconds:.0f} s {more()}")
        time.sleep(0.1)


def _kill(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens at, below those the kernel gives out."""
    found: list[int] = []
    for port in range(16000 + os.getpid() % 1000 * 3, 20000):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise Unavailable("no free ports")
