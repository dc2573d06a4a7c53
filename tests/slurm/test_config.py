"""What a cluster file may say, and what follows from it."""

from __future__ import annotations

import pytest

from recipes.config import GROUPS
from slurm.config import ClusterConfig, ContainerConfig, Fabric, HealthConfig, NetworkConfig, environment, seconds, segment, wrong
from tests.slurm.jobs import cluster


@pytest.mark.parametrize("name", GROUPS["cluster"])
def test_the_clusters_there_are_can_be_used(name: str) -> None:
    assert list(wrong(cluster(name))) == []
    assert cluster(name).signal_margin >= 90


@pytest.mark.parametrize(
    ("time", "wanted"),
    [
        ("5", 300),
        ("5:30", 330),
        ("04:00:00", 14400),
        ("2-0", 172800),
        ("1-12:30", 131400),
        ("1-00:00:05", 86405),
        ("4h", None),
        ("", None),
        ("1:2:3:4", None),
    ],
)
def test_time_limits(time: str, wanted: int | None) -> None:
    assert seconds(time) == wanted


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (ClusterConfig(time="4h"), "cluster.time=4h: not a time limit"),
        (ClusterConfig(time="5"), "give at least 6 minutes"),
        (ClusterConfig(signal_margin=60), "cluster.signal_margin=60: Slurm's signal comes up to a minute late; give at least 90"),
        (ClusterConfig(signal_margin=0, signal_margin_min=0), "give at least 1 "),
        (ClusterConfig(tasks_per_node=9), "cluster.tasks_per_node=9: a rank has a GPU of its own"),
        (ClusterConfig(gpus_per_node=-1), "cluster.gpus_per_node=-1"),
        (ClusterConfig(cpus_per_task=0), "cluster.cpus_per_task=0"),
        (ClusterConfig(health=HealthConfig(clock_skew=0)), "clock_skew=0: must be positive"),
        (ClusterConfig(network=NetworkConfig(gid_index=3)), "only cluster.network.fabric=roce has one"),
        (ClusterConfig(network=NetworkConfig(hca="mlx5_0")), "fabric=tcp uses no adapter"),
        (ClusterConfig(container=ContainerConfig(mounts=["/a:/b"])), "there is no container"),
        (ClusterConfig(container=ContainerConfig(image="")), "cluster.container.image: not given"),
        (ClusterConfig(environment={"A B": "1"}), "'A B' is no name of a variable"),
        (ClusterConfig(options=["reservation"]), "'reservation' is no option of sbatch"),
    ],
)
def test_what_cannot_be_is_refused_by_name(made: ClusterConfig, says: str) -> None:
    (line,) = wrong(made)
    assert says in line


def test_variables_of_the_network() -> None:
    made = ClusterConfig(network=NetworkConfig(Fabric.roce, interface="eth0", hca="mlx5", gid_index=3))
    made.environment = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "3"}
    assert environment(made) == {
        "OMP_NUM_THREADS": "3",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_IB_HCA": "mlx5",
        "NCCL_IB_GID_INDEX": "3",
        "NCCL_DEBUG": "INFO",
    }
    assert environment(ClusterConfig())["NCCL_IB_DISABLE"] == "1"
    assert environment(cluster("cpu")) == {"OMP_NUM_THREADS": "1"}
    assert environment(cluster("gb200_nvl72"))["NCCL_MNNVL_ENABLE"] == "1"


@pytest.mark.parametrize(("nodes", "wanted"), [(1, 1), (16, 16), (18, 18), (32, 16), (36, 18), (19, 1)])
def test_a_job_is_placed_in_whole_segments_of_a_rack(nodes: int, wanted: int) -> None:
    assert segment(cluster("gb200_nvl72"), nodes) == wanted
    assert segment(cluster("h100x8"), nodes) is None
