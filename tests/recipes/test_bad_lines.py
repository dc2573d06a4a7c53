"""Command lines with a mistake: exit code 2, a message that names the key and what to write instead, and nothing else happens."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from recipes import cli

LINES = [  # what is typed behind k3, and what the message must hold
    ("pretain", "the nearest is pretrain"),
    ("pretrain optim.lrr=1", "the nearest is optim.lr"),
    ("pretrain +optim.lrr=1", "the nearest is optim.lr"),
    ("pretrain +optim.lr=1", "give optim.lr=value to set it"),
    ("pretrain ~optim.lr", "deletes a key, and every key is needed"),
    ("pretrain optim.lr", "optim.lr: has no value"),
    ("pretrain optim.lr=fast", "optim.lr is by default"),
    ("pretrain optim.lr=nan", "takes a finite number"),
    ("pretrain optim.lr=1e-3,2e-3", "give --multirun for a run each"),
    ("pretrain --multirun optim.lr=1e-3", "no key has several values"),
    ("pretrain -m optim.lr=1e-3,2e-3 run.steps=0", "run.steps=0: must be at least 1"),
    ("pretrain run.steps=ten", "run.steps"),
    ("pretrain run.steps=0", "run.steps=0: must be at least 1"),
    ("pretrain model=nanno", "the nearest is nano"),
    ("pretrain model", "model: has no value"),
    ("pretrain optim=sgd", "there are muon"),
    ("pretrain parallel.tp=3", "must divide model.kda.heads"),
    ("pretrain parallel.tp=16", "parallel.tp=16"),
    ("pretrain parallel.vpp=2", "virtual stages need parallel.pp"),
    ("pretrain parallel.dp=3", "data.batch_size"),
    ("pretrain parallel.pp=40", "parallel.pp=40"),
    ("pretrain parallel.ep=7 parallel.dp=7", "parallel.ep=7"),
    ("pretrain precision=fp8", "precision=fp8: needs a GPU"),
    ("pretrain precision=mxfp8", "give precision=bf16"),
    ("pretrain qat=mxfp4", "give qat=none"),
    ("pretrain run.device=cuda", "give run.device=auto"),
    ("pretrain data.corpus=/no/such/folder", "data.corpus=/no/such/folder"),
    ("pretrain data.tokenizer=/no/such/file", "data.tokenizer=/no/such/file"),
    ("pretrain data.seq_length=2", "must be at least 3"),
    ("pretrain data.micro_batch_size=3", "data.micro_batch_size"),
    ("pretrain model.moe.top_k=32", "model.moe.top_k=32"),
    ("pretrain model.kda.lower_bound=-7", "must lie in [-5, 0)"),
    ("pretrain model.residual=sum model.residual_block=2", "has no effect, because model.residual=sum"),
    ("pretrain wandb.mode=disabled wandb.tags=[a]", "wandb.tags: has no effect"),
    ("pretrain wandb.stall=-1", "wandb.stall=-1"),
    ("pretrain checkpoint.every=10 checkpoint.keep_every=15", "must be a multiple of checkpoint.every=10"),
    ("pretrain run.resume=runs/none", "no run is there"),
    ("pretrain run.resume=auto", "give run.dir"),
    ("pretrain run.init=nowhere", "neither a checkpoint, nor a run folder, nor a published folder"),
    ("pretrain optim.lr=1e-3 optim.lr=2e-3", "optim.lr=1e-3 is given, too"),
    ("pretrain wandb.project=a/b", "the name of a W&B project cannot hold /"),
    ("pretrain wandb.group=''", "must have 1 to 128 characters"),
    ("pretrain run.dir=/proc/x", "run.dir=/proc/x: "),
    ("submit cluster=cpu precision=mxfp8 submit.dry_run=true", "precision=mxfp8: needs a GPU"),
    ('submit cluster.options=["--nodes=7"] submit.dry_run=true', "--nodes is decided by k3 submit"),
    ("submit cluster.environment.RUN=x submit.dry_run=true", "the job's script has one of its own"),
    ("pretrain hydra.run.dir=x", "Hydra's own keys are not read"),
    ("pretrain --cfg all", "give --cfg job"),
    ("pretrain recipe=k3_64", "the nearest is k3_64k"),
    ("prove parallel.tp=3", "parallel.tp=3"),
    ("prove run.steps=3", "k3 prove does not read run"),
    ("estimate gpu=h1000", "h100"),
    ("estimate search=true", "gpu"),
    ("submit nodes=0", "nodes=0"),
    ("submit cluster=h100 submit.dry_run=true", "the nearest is h100x8"),
    ("submit chain=[pretrain,sfft] submit.dry_run=true", "sfft"),
    ("submit recipe=k3 cluster=gb200_nvl72 nodes=3 submit.dry_run=true", "give nodes=256"),
    ("import published=nowhere out=x", "nowhere"),
    ("export run_or_checkpoint=nowhere out=x", "neither a run folder nor a checkpoint"),
    ("inspect nowhere", "neither a run folder, nor a checkpoint, nor a published folder"),
    ("cards optim.lr=1", "optim.lr=1: the table depends on the model alone"),
    ("bench kad", "the nearest is kda"),
    ("completion fish", "give one of bash, zsh"),
    ("sft", "run.init=null: k3 sft begins with a model"),
    ("rl", "run.init=null: k3 rl begins with a model"),
    ("extend", "run.init=null: k3 extend begins with a model"),
    ("distill distill.teachers=[gcd:x]", "run.init=null: k3 distill begins with a model"),
    ("eval", "run.init=null: k3 eval begins with a model"),
    ("sft run.init=nowhere", "run.init=nowhere: neither a checkpoint"),
    ("prove phase=sftt", "phase=sftt: no such phase; the nearest is sft"),
    ("pretrain rl.tau=1", "k3 pretrain does not read rl"),
    ("sft rl.tau=1", "k3 sft does not read rl"),
    ("rl distill.limit=1", "k3 rl does not read distill"),
    ("eval optim.lr=1", "k3 eval does not read optim"),
    ("pretrain data.chat.path=x", "data.chat.path: has no effect"),
]


@pytest.mark.parametrize(("line", "says"), LINES)
def test_a_bad_line(
    line: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    started: list[str] = []

    class Popen(subprocess.Popen):  # torch and the git of a version ask the system things when they are imported
        def __init__(self, args, *more, **named):
            started.append(str(args))
            super().__init__(args, *more, **named)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    assert cli.main(line.split()) == 2
    said = capfd.readouterr()
    assert says in said.err and said.out == "" and "Traceback" not in said.err
    assert all(text.startswith("k3: ") for text in said.err.splitlines())
    assert not list(tmp_path.iterdir()), "a folder was left"
    assert not [args for args in started if "recipes" in args or "slurm" in args or "sbatch" in args]


def test_there_are_forty() -> None:
    assert len(LINES) >= 40
