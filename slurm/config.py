"""What is known of a cluster and asked of it, as the user types it (`cluster=h100x8 cluster.time=04:00:00`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

MARGIN = 90  # seconds: Slurm looks at time limits every 30 s or so, and saving takes its time


# names in the script of a job that mean something there (slurm/job.sbatch.j2)
OWN = {"RUN", "NODES", "FIRST", "MASTER_ADDR", "MASTER_PORT", "K3_NODES", "RANK", "WORLD_SIZE", "LOCAL_RANK"}
# options of sbatch that follow from the keys of `cluster` and `submit`, or that would make another kind of job
DECIDED = {
    *("job-name", "partition", "account", "qos", "constraint", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task"),
    *("mem", "segment", "exclude", "time", "signal", "chdir", "output", "open-mode", "dependency", "kill-on-invalid-dep"),
    *(
        "exclusive",
        "requeue",
        "no-requeue",
        "array",
        "wrap",
        "ntasks",
        "error",
        "export",
        "test-only",
        "wait",
        "parsable",
        "hold",
    ),
}


class Fabric(Enum):
    tcp = "tcp"  # sockets alone: one machine, or Ethernet without RDMA
    infiniband = "infiniband"
    roce = "roce"  # RDMA over Ethernet


@dataclass
class NetworkConfig:
    fabric: Fabric = Fabric.tcp  # between nodes
    interface: str | None = None  # of the sockets by which ranks meet; null: the libraries choose
    hca: str | None = None  # adapters NCCL may use, in the words of NCCL_IB_HCA; null: all
    gid_index: int | None = None  # of RoCE; null: NCCL's choice
    nvlink_nodes: int = 1  # nodes that one NVLink domain joins; above 1, a job is placed in whole domains


@dataclass
class ContainerConfig:
    image: str | None = None  # a pyxis image: a .sqsh file, or registry#name:tag; null: no container; "": to be given
    mounts: list[str] = field(default_factory=list)  # SOURCE:TARGET, beside the working directory and the run folder


@dataclass
class HealthConfig:
    enabled: bool = True  # looks at every node before each start of the training
    timeout: int = 120  # seconds for all ranks to meet, and again for them to add up a tensor
    free_gib: float = 1.0  # that the disk of the run folder must have left
    clock_skew: float = 5.0  # seconds by which a node's clock may differ from the first one's


@dataclass
class ClusterConfig:
    partition: str | None = None  # null: the cluster's default; so with account, qos and constraint
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gpus_per_node: int = 8  # to ask for; 0: trains on CPUs
    tasks_per_node: int | None = None  # ranks of a node; null: one a GPU, or one where there are none
    cpus_per_task: int = 8
    memory: str | None = "0"  # of a node, as in 64G; 0: all there is; null: the cluster's default
    exclusive: bool = True  # no other job on the nodes
    time: str = "24:00:00"  # limit of one start, [days-]hours:minutes:seconds; a run that needs longer is requeued
    signal_margin: int = 180  # seconds before the limit at which the run is told to save
    signal_margin_min: int = MARGIN  # the least that signal_margin may be; lower it for trials alone
    requeue: bool = True  # a run that was stopped by the limit, preempted or lost a node goes on by itself
    exclude: list[str] = field(default_factory=list)  # nodes never to be used
    options: list[str] = field(default_factory=list)  # more of sbatch, such as --reservation=NAME
    log_dir: str | None = None  # null: the run folder
    python: str | None = None  # to start ranks with; null: that of this command, or python3 of the container
    environment: dict[str, str] = field(default_factory=dict)  # of the ranks; wins over what network gives
    network: NetworkConfig = field(default_factory=NetworkConfig)
    container: ContainerConfig = field(default_factory=ContainerConfig)
    health: HealthConfig = field(default_factory=HealthConfig)


def ranks_per_node(cluster: ClusterConfig) -> int:
    return cluster.tasks_per_node if cluster.tasks_per_node is not None else max(1, cluster.gpus_per_node)


def seconds(time: str) -> int | None:
    """Of a time limit in Slurm's words ([days-]hours[:minutes[:seconds]], or minutes[:seconds]); None where it is none."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if not found:
        return None
    days, *parts = found.groups()
    first, second, third = (int(part) if part is not None else None for part in parts)
    if days is not None:
        return int(days) * 86400 + (first or 0) * 3600 + (second or 0) * 60 + (third or 0)
    if third is not None:
        return (first or 0) * 3600 + (second or 0) * 60 + third
    return (first or 0) * 60 + (second or 0)


def segment(cluster: ClusterConfig, nodes: int) -> int | None:
    """Nodes of a job to be placed in one NVLink domain: the most that divides `nodes`; None without such domains."""
    if cluster.network.nvlink_nodes < 2:
        return None
    return max(size for size in range(1, cluster.network.nvlink_nodes + 1) if nodes % size == 0)


def environment(cluster: ClusterConfig) -> dict[str, str]:
    """The variables of NCCL, gloo and OpenMP that follow from the cluster, and then the user's own."""
    network, out = cluster.network, {"OMP_NUM_THREADS": str(cluster.cpus_per_task)}
    if network.interface:
        out["GLOO_SOCKET_IFNAME"] = network.interface
    if cluster.gpus_per_node:
        if network.interface:
            out["NCCL_SOCKET_IFNAME"] = network.interface
        if network.fabric is Fabric.tcp:
            out["NCCL_IB_DISABLE"] = "1"
        if network.hca:
            out["NCCL_IB_HCA"] = network.hca
        if network.gid_index is not None:
            out["NCCL_IB_GID_INDEX"] = str(network.gid_index)
        if network.nvlink_nodes > 1:
            out |= {"NCCL_MNNVL_ENABLE": "1", "NCCL_CUMEM_ENABLE": "1"}
    return out | cluster.environment


def wrong(cluster: ClusterConfig) -> Iterator[str]:
    """Every value that cannot be, one message each."""
    for key, value, least in (
        ("gpus_per_node", cluster.gpus_per_node, 0),
        ("tasks_per_node", ranks_per_node(cluster), 1),
        ("cpus_per_task", cluster.cpus_per_task, 1),
        ("network.nvlink_nodes", cluster.network.nvlink_nodes, 1),
        ("health.timeout", cluster.health.timeout, 1),
        ("health.free_gib", cluster.health.free_gib, 0),
    ):
        if value < least:
            yield f"cluster.{key}={value}: must be at least {least}"
    if not cluster.health.clock_skew > 0:
        yield f"cluster.health.clock_skew={cluster.health.clock_skew}: must be positive"
    if 0 < cluster.gpus_per_node < ranks_per_node(cluster):
        yield (
            f"cluster.tasks_per_node={ranks_per_node(cluster)}: a rank has a GPU of its own, and "
            f"cluster.gpus_per_node={cluster.gpus_per_node}; leave it out"
        )
    limit, least = seconds(cluster.time), -(-2 * cluster.signal_margin // 60)  # minutes
    if not limit:
        yield f"cluster.time={cluster.time}: not a time limit; give hours:minutes:seconds, such as 04:00:00"
    elif limit < 2 * cluster.signal_margin:
        yield (
            f"cluster.time={cluster.time}: with cluster.signal_margin={cluster.signal_margin} less than half of it would train; "
            f"give at least {least} minutes, as in cluster.time={least}:00"
        )
    if cluster.signal_margin < max(1, cluster.signal_margin_min):
        yield (
            f"cluster.signal_margin={cluster.signal_margin}: Slurm's signal comes up to a minute late; give at least "
            f"{max(1, cluster.signal_margin_min)} (cluster.signal_margin_min)"
        )
    yield from _without_effect(cluster)


def _without_effect(cluster: ClusterConfig) -> Iterator[str]:
    network, container = cluster.network, cluster.container
    if network.gid_index is not None and network.fabric is not Fabric.roce:
        yield f"cluster.network.gid_index={network.gid_index}: only cluster.network.fabric=roce has one; leave it out"
    if network.hca and network.fabric is Fabric.tcp:
        yield f"cluster.network.hca={network.hca}: cluster.network.fabric=tcp uses no adapter; leave it out"
    if container.image == "":  # as in a cluster file that is about containers
        yield "cluster.container.image: not given; give a .sqsh file or registry#name:tag"
    if container.mounts and container.image is None:
        yield "cluster.container.mounts: there is no container to mount into; give cluster.container.image, or leave it out"
    for name in cluster.environment:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            yield f"cluster.environment: {name!r} is no name of a variable"
        elif name in OWN or name.startswith("SLURM_"):
            yield f"cluster.environment.{name}: the job's script has one of its own; leave it out"
    for option in cluster.options:
        if not re.fullmatch(r"--?[a-z][\w-]*(=\S+)?", option):
            yield f"cluster.options: {option!r} is no option of sbatch; give it as --NAME=VALUE"
        elif (name := option.lstrip("-").partition("=")[0]) in DECIDED:
            yield f"cluster.options: {option!r}: --{name} is decided by k3 submit; set it by its own key, or leave it out"
