"""The script of a job: what it looks like for each cluster, and what it does, with stand-ins for srun and scontrol.

With the real ones it runs in tests/cluster. To write the golden scripts anew: K3_GOLDEN=write pytest tests/slurm/test_script.py
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from recipes.config import GROUPS
from slurm.client import clean
from slurm.config import ClusterConfig, ContainerConfig
from slurm.script import render
from tests.slurm.jobs import cluster, job

GOLDEN = Path(__file__).parent / "golden"

SCONTROL = """#!/bin/bash
case "$*" in
"show hostnames "*) printf 'n07\\nn02\\nn11\\n' ;;
"--oneliner show node "*) echo "NodeName=$4 Arch=x NodeAddr=10.0.0.${4#n} NodeHostName=$4" ;;
"--oneliner show job "*) echo "JobId=$4 JobState=$(cat state) Reason=None" ;;
"requeue "*) echo "$2" >> requeued; kill $PPID ;;
esac
"""
SRUN = """#!/bin/bash
echo "$MASTER_ADDR $MASTER_PORT $K3_NODES $NCCL_DEBUG" >> met
case "$*" in
*slurm.health*) exit $(cat health) ;;
esac
trap 'echo told >> told; exit 0' USR1
touch training
for _ in $(seq $(cat length)); do sleep 0.05; done
exit $(cat code)
"""


@pytest.mark.parametrize("name", GROUPS["cluster"])
def test_the_script_of_each_cluster(name: str) -> None:
    file = GOLDEN / f"{name}.sbatch"
    text = render(job(), cluster(name))
    if os.environ.get("K3_GOLDEN") == "write":
        file.write_text(text)
    assert text == file.read_text()
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""


def test_a_link_of_a_chain_waits_for_the_one_before_and_dies_with_it() -> None:
    text = render(job(after=17, exclude=("n3", "n[5-6]")), cluster("slurm"))
    assert "#SBATCH --dependency=afterok:17\n#SBATCH --kill-on-invalid-dep=yes\n" in text
    assert "#SBATCH --exclude=n3,n[5-6]\n" in text


def test_what_a_user_typed_is_quoted() -> None:
    nasty = "/a b/$(touch x)`y`'\"z"
    made = ClusterConfig(environment={"A": nasty}, python=nasty, container=ContainerConfig(image=nasty))
    text = render(job(run=nasty, resume=f"k3 submit {shlex.quote(nasty)}", words=("pretrain", nasty)), made)
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
    lines = [line for line in text.splitlines() if line.startswith(("RUN=", "export A="))]
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines) + '\nprintf "%s\\n" "$RUN" "$A"'], text=True, capture_output=True, check=True
    )
    assert done.stdout.splitlines() == [nasty, nasty]
    (said,) = [line.strip() for line in text.splitlines() if 'say "cancelled' in line]
    done = subprocess.run(["bash", "-c", f'say() {{ echo "$*"; }}\n{said}'], text=True, capture_output=True, check=True)
    assert done.stdout.strip() == f"cancelled; continue with: k3 submit {shlex.quote(nasty)}"


def test_defaults_of_the_environment_do_not_win_over_the_script() -> None:
    env = {"SBATCH_PARTITION": "other", "SBATCH_ACCOUNT": "mine", "SLURM_NTASKS": "9", "SLURM_CONF": "here", "PATH": "/bin"}
    text = render(job(), ClusterConfig(partition="train"))
    assert clean(env, text) == {"SBATCH_ACCOUNT": "mine", "SLURM_CONF": "here", "PATH": "/bin"}


class Start:
    """One start of the script in a folder with stand-ins; what they shall do is in files there."""

    def __init__(self, folder: Path, *, health: int = 0, code: int = 0, length: int = 0, state: str = "RUNNING"):
        self.folder = folder
        for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        for name, value in (("health", health), ("code", code), ("length", length), ("state", state)):
            (folder / name).write_text(f"{value}\n")
        made = cluster("cpu")
        made.environment = {"NCCL_DEBUG": "INFO"}
        (folder / "job.sbatch").write_text(render(job(run=str(folder), directory=str(folder)), made))
        env = {
            **os.environ,
            "PATH": f"{folder}:{os.environ['PATH']}",
            "SLURM_JOB_NODELIST": "n[07,02,11]",
            "SLURM_JOB_ID": "7003",
        }
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(["bash", "job.sbatch"], cwd=folder, env=env, start_new_session=True, **pipes)

    def ends(self) -> tuple[int, str]:
        try:
            said, _ = self.process.communicate(timeout=60)
        finally:
            self.process.kill()
        return self.process.returncode, said

    def when_it_trains(self, number: int) -> None:
        deadline = time.monotonic() + 60
        while not (self.folder / "training").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        self.process.send_signal(number)

    @property
    def requeued(self) -> bool:
        return (self.folder / "requeued").exists()


def test_ranks_meet_at_the_first_node_of_the_job(tmp_path: Path) -> None:
    """The first in the order of the node list, not of the alphabet, and by its address."""
    code, said = Start(tmp_path, code=3).ends()
    assert (tmp_path / "met").read_text().splitlines() == ["10.0.0.07 24006 n07 n02 n11 INFO"] * 2
    assert "start 1, on n07 n02 n11; ranks meet at 10.0.0.07:24006" in said and code == 3


def test_a_failed_run_fails_the_job(tmp_path: Path) -> None:
    start = Start(tmp_path, code=3)
    code, said = start.ends()
    assert code == 3 and "training failed: exit code 3" in said and not start.requeued
    assert (tmp_path / "job.exit").read_text() == "7003 3\n"


def test_unfit_nodes_fail_the_job_before_it_trains(tmp_path: Path) -> None:
    start = Start(tmp_path, health=1)
    code, said = start.ends()
    assert code == 1 and "not fit to train: exit code 1" in said and not start.requeued and not (tmp_path / "training").exists()


def test_a_complete_run_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "summary.json").touch()
    code, said = Start(tmp_path, code=3).ends()
    assert code == 0 and "complete" in said and not (tmp_path / "met").exists()


@pytest.mark.parametrize("code", [0, 138])
def test_a_run_that_saved_and_is_not_complete_goes_back_into_the_queue(tmp_path: Path, code: int) -> None:
    start = Start(tmp_path, code=code)
    ended, said = start.ends()
    assert ended and start.requeued and "back in the queue" in said and not (tmp_path / "job.exit").exists()


def test_the_signal_reaches_the_ranks_and_the_job_goes_back(tmp_path: Path) -> None:
    start = Start(tmp_path, code=3, length=1000)
    start.when_it_trains(signal.SIGUSR1)
    _, said = start.ends()
    assert (tmp_path / "told").exists() and start.requeued, said


def test_a_cancelled_job_waits_for_its_ranks_and_stays_cancelled(tmp_path: Path) -> None:
    start = Start(tmp_path, length=20, state="COMPLETING")
    start.when_it_trains(signal.SIGTERM)
    code, said = start.ends()
    assert code == 1 and not start.requeued and "cancelled; continue with: k3 submit run.resume=runs/nano-1" in said
