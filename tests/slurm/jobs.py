"""One job for tests of its script, and the clusters of recipes/conf."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from recipes.config import GROUPS
from slurm.config import ClusterConfig
from slurm.script import Job

RUN = "/shared/project/runs/nano-1"
JOB = Job(
    name="nano-1",
    nodes=16,
    run=RUN,
    log=f"{RUN}/job-%j.log",
    directory="/shared/project",
    python="/shared/project/.venv/bin/python",
    words=("pretrain", f"run.dir={RUN}", "run.resume=auto"),
    resume="k3 submit run.resume=runs/nano-1 nodes=16",
)


def job(**changes: Any) -> Job:
    return replace(JOB, **changes)


def cluster(name: str) -> ClusterConfig:
    found = GROUPS["cluster"][name]()
    if name == "slurm_container":
        found.container.image, found.container.mounts = "/shared/images/k3.sqsh", ["/shared/data:/data"]
    return found
