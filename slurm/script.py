"""The sbatch script of one run: `#SBATCH` options, the environment, a look at the nodes, the training, and what comes after."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jinja2

from slurm.config import ClusterConfig, environment, ranks_per_node, segment

TEMPLATE = Path(__file__).parent / "job.sbatch.j2"


@dataclass(frozen=True)
class Job:
    """One run as a job. All paths are absolute, and every node sees them."""

    name: str
    nodes: int
    run: str  # the run folder
    log: str  # of stdout and stderr; %j is the number of the job
    directory: str  # that relative paths in the configuration start from
    python: str  # to start the ranks with, outside a container
    words: tuple[str, ...]  # of k3 on each rank
    resume: str  # the command with which a user continues it
    after: int | None = None  # the job that must have ended well
    exclude: tuple[str, ...] = field(default=())  # nodes, beside the cluster's own


def render(job: Job, cluster: ClusterConfig) -> str:
    """The text of the script. Everything in it that a user has typed is quoted for the shell."""
    python = cluster.python or ("python3" if cluster.container.image else job.python)
    start = [python, "-P", "-m"]
    health = cluster.health
    look = [
        *(*start, "slurm.health", f"--gpus={cluster.gpus_per_node}", f"--timeout={health.timeout}", f"--folder={job.run}"),
        *(f"--free-gib={health.free_gib}", f"--clock-skew={health.clock_skew}"),
    ]
    made = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    return made.from_string(TEMPLATE.read_text()).render(
        options=list(options(job, cluster)),
        run=shlex.quote(job.run),
        environment={name: shlex.quote(value) for name, value in environment(cluster).items()},
        cpus=cluster.cpus_per_task,
        container=[shlex.quote(option) for option in container(job, cluster)],
        health=shlex.join(look) if health.enabled else "",
        train=shlex.join([*start, "recipes.cli", *job.words]),
        requeue=cluster.requeue,
        resume=job.resume.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("`", "\\`"),
    )


def options(job: Job, cluster: ClusterConfig) -> Iterator[str]:
    """Of sbatch, as they stand behind `#SBATCH`, where quotes and blanks are understood as by a shell."""
    given: dict[str, object] = {
        "job-name": job.name,
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "nodes": job.nodes,
        "ntasks-per-node": ranks_per_node(cluster),
        "gpus-per-node": cluster.gpus_per_node or None,
        "cpus-per-task": cluster.cpus_per_task,
        "mem": cluster.memory,
        "segment": segment(cluster, job.nodes),
        "exclude": ",".join([*cluster.exclude, *job.exclude]) or None,
        "time": cluster.time,
        "signal": f"B:USR1@{cluster.signal_margin}",
        "chdir": job.directory,
        "output": job.log,
        "open-mode": "append",
        "dependency": f"afterok:{job.after}" if job.after is not None else None,
        "kill-on-invalid-dep": "yes" if job.after is not None else None,
    }
    for name, value in given.items():
        if value is not None:
            yield f"--{name}={_quoted(str(value))}"
    if cluster.exclusive:
        yield "--exclusive"
    yield "--requeue" if cluster.requeue else "--no-requeue"
    yield from cluster.options


def container(job: Job, cluster: ClusterConfig) -> Sequence[str]:
    """The options of srun that pyxis adds."""
    if cluster.container.image is None:
        return []
    inside = Path(job.run).is_relative_to(job.directory)
    own = [job.directory, *([] if inside else [job.run])]
    mounts = [*(f"{path}:{path}" for path in own), *cluster.container.mounts]
    return [
        f"--container-image={cluster.container.image}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={job.directory}",
    ]


def _quoted(value: str) -> str:
    return value if all(c.isalnum() or c in "%/._-:@,=[]&|*+" for c in value) else '"' + value.replace('"', '\\"') + '"'
