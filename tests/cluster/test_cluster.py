"""`k3 submit` on a real Slurm: two-node runs that are stopped, preempted, cancelled and chained, and what is refused.

The model is tiny and a node is an address of this machine; Slurm, srun, gloo and the run are the real ones.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from parallel import checkpoint
from recipes import cli
from recipes.submit import read_facts
from tests.cluster.loopback import Loopback, until
from tests.recipes.small_run import SIZES, curve, metrics, same_checkpoint, stored, write_corpus

pytestmark = pytest.mark.slow

STEPS = 24
CLUSTER = ("cluster=cpu", "nodes=2", "cluster.signal_margin_min=1", "cluster.signal_margin=20")
QUIET = ("run.sample_tokens=0", "run.eval_every=0", "checkpoint.every=0", "wandb.mode=disabled", f"run.steps={STEPS}")
UNSEEN = "cluster.health.enabled=false"  # saves seconds where another test has looked


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    write_corpus(home / "corpus")
    return home


@pytest.fixture
def at_home(home: Path, cluster: Loopback, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(home)
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    return home


def words(run: str, *more: str) -> list[str]:
    typed = [*CLUSTER, *SIZES, *QUIET, "data.corpus=corpus", "data.cache=cache", f"run.dir=runs/{run}", *more]
    return list({word.partition("=")[0]: word for word in typed}.values())  # the last one of a key


def submit(run: str, *more: str) -> list[int]:
    """The numbers of the jobs."""
    assert cli.main(["submit", *words(run, *more)]) == 0
    folders = sorted(Path("runs").glob(f"{run}-*-pretrain")) or [Path("runs") / run]
    return [read_facts(folder)["job"] for folder in folders]


def log(folder: Path) -> str:
    return Path(read_facts(folder)["log"]).read_text()


def reaches(folder: Path, step: int) -> None:
    file = folder / "metrics.jsonl"
    until(lambda: file.exists() and file.read_text().count("\n") >= step, 180, f"step {step} of {folder}", lambda: log(folder))


def status(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    capsys.readouterr()
    assert cli.main(["status", str(folder)]) == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def chain(home: Path, cluster: Loopback) -> tuple[Path, Path]:
    """An uninterrupted run, and one that began with its weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setenv("SLURM_CONF", str(cluster.conf))
        first, second = submit("whole", "chain=[pretrain,pretrain]", "2:run.steps=2", f"2:{UNSEEN}")
        folders = home / "runs/whole-1-pretrain", home / "runs/whole-2-pretrain"
        assert cluster.job(second)["Dependency"].startswith(f"afterok:{first}")
        for number, folder in zip((first, second), folders):
            ended = cluster.wait(number, "COMPLETED", "FAILED", "CANCELLED", seconds=240)
            assert ended["JobState"] == "COMPLETED", log(folder)
        return folders


def test_a_chain_trains_one_run_after_the_other_with_its_weights(chain: tuple[Path, Path]) -> None:
    first, second = chain
    assert "health: 2 nodes and 2 ranks are well" in log(first)
    assert "on n1 n2; ranks meet at 127.0.0.1:" in log(first)
    assert json.loads((first / "summary.json").read_text())["parallel"]["processes"] == 2
    assert f"weights of {Path('runs') / first.name}" in log(second)
    assert metrics(second)[0]["loss"] < metrics(first)[0]["loss"] and len(metrics(second)) == 2


def test_a_run_told_to_stop_and_then_preempted_ends_as_if_nothing_had_been(
    chain: tuple[Path, Path], at_home: Path, cluster: Loopback, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = at_home / "runs/stopped"
    (number,) = submit("stopped", UNSEEN)
    reaches(folder, 3)
    cluster.slurm("scancel", "--batch", "--signal=USR1", str(number))  # as Slurm does before the time limit
    cluster.wait(number, "PENDING", seconds=60)
    assert "requeued" in status(capsys, folder)
    done = len(metrics(folder))
    assert 3 <= done < STEPS and checkpoint.latest(folder / "checkpoints") is not None

    reaches(folder, done + 2)
    urgent = ["sbatch", "--parsable", "--partition=urgent", "--exclusive", "--nodes=3", "--output=/dev/null", "--wrap=sleep 1"]
    urgent_job = int(cluster.slurm(*urgent))
    cluster.wait(urgent_job, "COMPLETED", seconds=120)
    ended = cluster.wait(number, "COMPLETED", "FAILED", "CANCELLED", seconds=240)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "2"), log(folder)
    assert log(folder).count("back in the queue") == 2, "no step was lost to a kill"
    assert curve(folder) == curve(chain[0]), "bit for bit"
    same_checkpoint(folder / f"checkpoints/step_{STEPS}", chain[0] / f"checkpoints/step_{STEPS}")
    assert f"done      step {STEPS}/{STEPS}" in status(capsys, folder)


def test_a_cancelled_job_leaves_a_good_checkpoint(at_home: Path, cluster: Loopback, capsys: pytest.CaptureFixture[str]) -> None:
    folder = at_home / "runs/cancelled"
    (number,) = submit("cancelled", UNSEEN)
    reaches(folder, 2)
    assert f"job {number} on n[1-2]" in (said := status(capsys, folder)) and "running" in said
    cluster.slurm("scancel", str(number))
    assert cluster.wait(number, "CANCELLED")["Restarts"] == "0"
    until(lambda: "cancelled; continue with" in log(folder), 60, "last word", lambda: log(folder))
    last = checkpoint.latest(folder / "checkpoints")
    assert last is not None and stored(last) and checkpoint.facts(last)["step"] == len(metrics(folder)) < STEPS
    said = status(capsys, folder)
    assert "stopped" in said
    command = said.splitlines()[-1].removeprefix("    continue with: ")
    assert command.startswith("k3 submit run.dir=runs/cancelled run.resume=auto nodes=2 cluster=cpu ")
    assert cli.main([*shlex.split(command)[1:], "submit.dry_run=true"]) == 0


def test_unfit_nodes_fail_the_job_and_its_child_is_cancelled(
    at_home: Path, cluster: Loopback, capsys: pytest.CaptureFixture[str]
) -> None:
    """The nodes have a GPU by Slurm's book and none in fact. They are not the first ones, and the ranks meet at one of them."""
    parent, child = submit("unfit", "chain=[pretrain,pretrain]", "submit.exclude=[n1]", "1:cluster.gpus_per_node=1")
    assert cluster.wait(parent, "FAILED", "COMPLETED")["JobState"] == "FAILED"
    cluster.wait(child, "CANCELLED", seconds=60)
    assert not list((at_home / "runs/unfit-2-pretrain").glob("job-*.log")), "it has never started"
    folder = at_home / "runs/unfit-1-pretrain"
    said = log(folder)
    assert "on n2 n3; ranks meet at 127.0.0.2:" in said
    assert "k3: health: n2: 0 of 1 GPUs\n" in said and "k3: health: n3: 0 of 1 GPUs\n" in said
    assert not (folder / "metrics.jsonl").exists()
    said = status(capsys, folder)
    assert (
        "failed" in said
        and "exit code 1" in said
        and "continue with: k3 submit run.dir=runs/unfit-1-pretrain run.resume=auto nodes=2" in said
    )


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("cluster.partition=trian", "cluster.partition=trian: the cluster has no such partition; the nearest is train"),
        ("nodes=9 data.batch_size=18", "nodes=9: the default partition has 3; give nodes=3 or fewer"),
        ("cluster.log_dir=corpus/00.txt/logs", "cluster.log_dir=corpus/00.txt/logs: logs cannot be written there"),
        ("cluster.cpus_per_task=5", "tasks_per_node=1 cluster.cpus_per_task=5 cluster.memory=null: sbatch refuses the job: "),
    ],
)
def test_what_slurm_cannot_take_is_a_message(
    word: str, says: str, at_home: Path, cluster: Loopback, capsys: pytest.CaptureFixture[str]
) -> None:
    before = cluster.slurm("squeue", "-h", "-o", "%i")
    assert cli.main(["submit", *words("refused", *word.split())]) == 2
    assert says in capsys.readouterr().err
    assert cluster.slurm("squeue", "-h", "-o", "%i") == before and not Path("runs/refused").exists()
