"""`k3 submit`: what is composed, what is refused before anything is queued, and chains. The real queue is in tests/cluster."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from k3.presets import PRESETS
from recipes import cli
from recipes.chain import stages
from recipes.compose import compose, load_resolved, resolved_yaml
from recipes.config import GROUPS, leaves
from recipes.errors import UserError, word
from recipes.submit import job, queue, resume_command
from slurm.config import ClusterConfig

PHASES = ["pretrain"]
TINY = ("cluster=cpu", "model=tiny")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refusal(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        stages(words, PHASES)
    return str(caught.value)


def test_data_ranks_fill_the_nodes() -> None:
    cfg = compose(["cluster=h100x8", "nodes=4", "model=nano", "parallel.tp=2", "parallel.pp=2", "data.batch_size=8"], "submit")
    assert cfg.parallel.dp == 8 and cfg.cluster.signal_margin == 300
    assert compose([*TINY, "nodes=2"], "submit").parallel.dp == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nodes=2", "parallel.dp=8"], "nodes=2, with 8 ranks a node (cluster.gpus_per_node=8): 16 ranks"),
        (["nodes=2", "parallel.dp=8"], "parallel.tp * pp * cp * dp = 1 * 1 * 1 * 8 = 8; give parallel.dp=16, or give nodes=1"),
        (["nodes=1", "parallel.pp=3"], "does not divide; give nodes=1 cluster.tasks_per_node=3"),
        (["cluster=gb200_nvl72", "nodes=1", "parallel.tp=2", "parallel.dp=3"], "give nodes=2 cluster.tasks_per_node=3"),
        (
            ["cluster=cpu", "nodes=3", "parallel.ep=2"],
            "3 ranks, and parallel.ep=2 does not divide tp * cp * dp = 1 * 1 * 3 = 3; give nodes=2",
        ),
        (["nodes=0"], "nodes=0: must be at least 1"),
        (["cluster=cpu", "run.device=cuda"], "run.device=cuda: cluster.gpus_per_node=0 asks for no GPU"),
        (["run.device=cpu"], "run.device=cpu: cluster.gpus_per_node=8 asks for GPUs; give cluster=cpu"),
        (["cluster=slurm_container"], "cluster.container.image: not given"),
        (["cluster=h100"], "cluster=h100: no such cluster; the nearest is h100x8; there are cpu, gb200_nvl72"),
        (["cluster.partiton=x"], "the nearest is cluster.partition"),
        (["cluster.environment={A: 1}"], "give cluster.environment.NAME=VALUE for each"),
        (["cluster.time=1"], "cluster.time=1: with cluster.signal_margin=180"),
        (["optim.lrr=1"], "the nearest is optim.lr"),
        (["cluster=cpu", "nodes=2", "data.batch_size=3"], "data.batch_size=3"),
        (["chain=[pretrain,sft]"], "chain=[pretrain,sft]: k3 has no phase sft; there is pretrain"),
        (["chain=[pretrian]"], "k3 has no phase pretrian; the nearest is pretrain"),
        (["chain=[]"], "chain=[]: names no phase"),
        (["3:run.steps=1", "chain=[pretrain,pretrain]"], "3:run.steps=1: the chain has 2 stages, from 1"),
        (["pretrain:run.steps=1", "chain=[pretrain,pretrain]"], "pretrain is more than one stage of"),
        (["sft:run.steps=1", "chain=[pretrain,pretrain]"], "sft is no stage of chain=[pretrain,pretrain]; give its number"),
        (["2:run.dir=x", "chain=[pretrain,pretrain]"], "belongs to the whole chain; give it without 2:"),
        (["2:model.moe.top_k=3", *TINY, "chain=[pretrain,pretrain]"], "model.moe.top_k=3: the weights of run.init="),
        (["2:model.layers=7", *TINY, "chain=[pretrain,pretrain]"], "model.layers=7: the weights of run.init="),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_queued(words: list[str], says: str) -> None:
    assert says in refusal(*words)


def test_other_verbs_know_no_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pretrain", "cluster=cpu"]) == 2
    assert "k3 pretrain does not read cluster" in capsys.readouterr().err


def test_a_job_trains_what_its_folder_says(tmp_path: Path) -> None:
    """The resolved file alone gives the job's configuration, in which nothing is of the cluster."""
    (link,) = stages([*TINY, "nodes=2", "run.steps=7", "cluster.environment.NCCL_DEBUG=INFO"], PHASES)
    made = job(link)
    folder = Path(made.run)
    assert folder.parent == tmp_path / "runs" and made.words == ("pretrain", f"run.dir={folder}", "run.resume=auto")
    assert link.cfg.cluster.environment == {"NCCL_DEBUG": "INFO"}
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(resolved_yaml(link.cfg))
    assert load_resolved(folder / "config.yaml").cluster == ClusterConfig()
    there = compose(made.words[1:])
    free = {"run.dir", "run.resume"}
    differ = {
        k for (k, a), (_, b) in zip(leaves(there), leaves(link.cfg)) if a != b and k.split(".")[0] not in ("cluster", "nodes")
    }
    assert differ <= free and there.parallel.dp == 2 and there.run.steps == 7


def test_a_run_is_continued_on_other_nodes(tmp_path: Path) -> None:
    (link,) = stages([*TINY, "nodes=2", "run.dir=r"], PHASES)
    (tmp_path / "r").mkdir()
    (tmp_path / "r/config.yaml").write_text(resolved_yaml(link.cfg))
    words = ["run.resume=r", "cluster=cpu", "nodes=4", "parallel.dp=4", "cluster.time=02:00:00"]
    (again,) = stages(words, PHASES)
    assert (again.cfg.nodes, again.cfg.parallel.dp, again.cfg.cluster.time, again.cfg.run.dir) == (4, 4, "02:00:00", "r")
    assert "parallel.dp=2" in refusal("run.resume=r", "cluster=cpu", "nodes=4") or "dp = 1 * 1 * 1 * 2" in refusal(*words[:3])


def test_stages_of_a_chain_begin_with_the_one_before() -> None:
    first, second = stages(
        [*TINY, "chain=[pretrain,pretrain]", "run.dir=c", "run.steps=9", "1:model.layers=6", "2:run.steps=3", "2:optim.lr=1e-4"],
        PHASES,
    )
    assert (first.cfg.run.dir, second.cfg.run.dir) == ("c-1-pretrain", "c-2-pretrain")
    assert (first.cfg.run.init, second.cfg.run.init) == (None, "c-1-pretrain")
    assert (first.cfg.run.steps, second.cfg.run.steps, second.cfg.optim.lr) == (9, 3, 1e-4)


def test_the_model_of_a_chain_is_the_first_ones() -> None:
    first, second = stages(["cluster=cpu", "chain=[pretrain,pretrain]", "model=tiny", "1:model.layers=6"], PHASES)
    assert first.cfg.model == second.cfg.model == dataclasses.replace(PRESETS["tiny"](), layers=6)


def test_the_dry_run_prints_the_scripts_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["submit", *TINY, "nodes=2", "chain=[pretrain,pretrain]", "submit.dry_run=true"]) == 0
    out = capsys.readouterr().out
    assert out.count("#!/bin/bash\n") == 2 and "#SBATCH --nodes=2\n" in out
    assert list(tmp_path.iterdir()) == []


def test_without_slurm_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["submit", *TINY]) == 2
    assert "give submit.dry_run=true" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("says", "key"),
    [
        ("Batch job submission failed: Invalid account or account/partition combination specified", "cluster.account=mine: "),
        ("Batch job submission failed: Invalid qos specification", "cluster.qos=null: "),
        (
            "Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)",
            "cluster.time=01:00:00: ",
        ),
        ("Batch job submission failed: Invalid feature specification", "cluster.constraint=null: "),
    ],
)
def test_what_sbatch_refuses_is_told_with_its_key(says: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the words of Slurm 22.05; what the loopback cluster refuses itself is in tests/cluster."""
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\necho 'sbatch: error: {says}' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    (tmp_path / "script").write_text("")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    cfg = compose([*TINY, "cluster.account=mine"], "submit")
    with pytest.raises(UserError, match=f"^{re.escape(key)}sbatch refuses the job: {re.escape(says)}$"):
        queue(tmp_path / "script", cfg)


def test_words_survive_the_shell_and_hydra() -> None:
    nasty = 'a b/$(x)`y`"z\\ ünd'
    cfg = compose([*TINY, "nodes=2"], "submit")
    command = shlex.split(resume_command(nasty, ["cluster=cpu", word("cluster.account", nasty), "run.steps=3"], cfg))
    assert command[:2] == ["k3", "submit"] and not any("run.steps" in text for text in command)
    again = compose([text for text in command[2:] if not text.startswith("run.")], "submit")
    assert again.cluster.account == nasty
    assert compose([*TINY, word("run.dir", nasty)], "submit").run.dir == nasty


def test_every_cluster_file_is_an_option() -> None:
    assert {"slurm", "slurm_container", "h100x8", "gb200_nvl72", "cpu"} <= set(GROUPS["cluster"])
