"""`k3 estimate`: its figures against real parameters, buffers, optimizer states and pipelines, and what it prints."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest
import torch

from optim.config import Offload
from parallel.config import world_size
from parallel.local import Helper
from recipes import cli
from recipes.compose import compose
from recipes.config import Config, Precision
from recipes.memory import account
from tests.recipes.memory_ranks import batches

DTYPES = {Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16, Precision.fp64: torch.float64}
PADDING = 64 + 128  # elements at most before a parameter and behind a bucket: megatron-core's bucket padding
SMALL = ["model=tiny", "model.layers=5", "model.residual_block=2", "data.seq_length=64", "data.batch_size=8"]


def config(*words: str) -> Config:
    return compose([*SMALL, *words], job="estimate")


STATES = [
    ["precision=bf16"],
    ["precision=fp64", "optim=adamw"],
    ["parallel.dp=2", "precision=bf16"],
    ["precision=bf16", "optim.offload=cpu"],
    ["parallel.dp=2", "optim.offload=cpu"],
    ["parallel.dp=2", "parallel.zero=0"],
    ["parallel.dp=2", "parallel.ep=2", "precision=bf16", "optim.router.optimizer=muon"],
    ["parallel.tp=2", "precision=bf16"],
    ["parallel.pp=2", "parallel.split=[2,3]", "precision=bf16"],
    ["parallel.pp=2", "parallel.vpp=2", "parallel.split=[0,2,2,1]", "data.micro_batch_size=2"],
]


@pytest.mark.parametrize("words", STATES, ids=" ".join)
def test_state_is_what_is_really_allocated(words: list[str], helper: Helper):
    cfg = config(*words)
    size = world_size(cfg.parallel)
    real = helper.run_ranks("tests.recipes.memory_ranks:state", size, cfg, DTYPES[cfg.precision.name])
    ranks = account(cfg)
    for number, there in enumerate(real):
        said = ranks[number if cfg.parallel.pp > 1 else 0].memory
        assert (said.parameters, said.weights, said.gradients) == (there["parameters"], there["weights"], there["gradients"])
        room = PADDING * (there["tensors"] + there["buckets"])
        assert 0 <= there["buffers"] - said.gradients <= room * 8
        of_optimizer = said.offloaded if cfg.optim.offload is Offload.cpu else said.optimizer
        assert said.optimizer + said.offloaded == of_optimizer
        if cfg.parallel.dp == 1 or not cfg.parallel.zero:
            assert of_optimizer == there["optimizer"]
    if cfg.parallel.dp == 2 and cfg.parallel.zero:
        # two ranks share what one would hold; where the cut falls inside padding, their parts differ by no more than it
        widest = 16 * real[0]["tensors"]  # bytes of an element's master and moments, for each parameter
        assert abs(of_optimizer - sum(there["optimizer"] for there in real) / 2) <= widest
        assert all(abs(of_optimizer - there["optimizer"]) <= PADDING * widest for there in real)


@pytest.mark.parametrize("vpp", [1, 2])
def test_a_real_pipeline_holds_what_is_said(vpp: int, helper: Helper):
    split = "[2,3]" if vpp == 1 else "[1,1,2,1]"
    cfg = config("parallel.pp=2", f"parallel.vpp={vpp}", f"parallel.split={split}", "data.micro_batch_size=2")
    real = helper.run_ranks("tests.recipes.memory_ranks:pipeline", 2, cfg, torch.float32, batches(cfg, 4, 2))
    for rank, there in zip(account(cfg, documents=1), real, strict=True):
        assert there["each"] == {s.number: s.per_micro_batch for s in rank.stages}
        # masks beside the saved tensors are not in the measured peak
        assert there["peak"] == pytest.approx(sum(s.per_micro_batch * s.in_flight for s in rank.stages), rel=0.02)


def test_the_full_size_model_is_accounted_for_at_once_and_without_torch():
    words = [
        "estimate", "model=k3", "precision=bf16", "parallel.pp=16", "parallel.tp=8", "parallel.ep=64", "parallel.dp=8",
        "data.seq_length=4096", "data.batch_size=256", "data.micro_batch_size=1",
    ]  # fmt: skip
    script = f"import sys; sys.modules['torch'] = None; from recipes.cli import main; sys.exit(main({words!r}))"
    began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - began < 5, "seconds of work; it takes about one"
    lines = done.stdout.splitlines()
    assert len([line for line in lines if "layers " in line]) == 16
    assert lines[-1].startswith("worst: pipeline rank ")


def test_parameters_are_those_of_the_cards():
    cfg = compose(["model=k3", "parallel.pp=4", "parallel.vpp=2", "data.micro_batch_size=1"], job="estimate")
    ranks = account(cfg)
    biases = 92 * 896  # of routers: buffers, and no parameters
    assert sum(rank.memory.parameters for rank in ranks) == 2_779_484_476_000 - biases


def test_zero_two_shares_two_buffers():
    words = ["parallel.pp=2", "parallel.vpp=2", "parallel.dp=2", "data.micro_batch_size=1"]
    one, two = (account(config(*words, f"parallel.zero={zero}"))[0] for zero in (1, 2))
    largest = max(stage.memory.gradients for stage in one.stages)
    rest = sum(stage.memory.gradients for stage in two.stages)
    assert two.memory.gradients == 2 * largest + rest and rest == pytest.approx(one.memory.gradients / 2, rel=1e-3)
    away = account(config(*words, "parallel.zero=2", "parallel.offload_gradients=true"))[0]
    assert away.memory.gradients == 2 * largest and away.memory.offloaded == rest


def test_what_is_offloaded_has_a_column_of_its_own(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["estimate", *SMALL]) == 0
    assert "CPU memory" not in capsys.readouterr().out
    assert cli.main(["estimate", *SMALL, "optim.offload=cpu"]) == 0
    heading, row = (line for line in capsys.readouterr().out.splitlines() if "in CPU memory" in line or "embedding, " in line)
    assert heading.split("  ")[-1].strip() == "in CPU memory" and row.rstrip().endswith("MiB")


def test_the_table_and_the_verdict(capsys: pytest.CaptureFixture[str]):
    words = ["estimate", *SMALL, "parallel.pp=2", "parallel.split=[1,4]", "data.micro_batch_size=2"]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "embedding, layer 0" in out and "embedding, layers 1-4, head, mtp" in out
    assert "4 micro-batches of 2 x 64 tokens" in out
    assert "worst: pipeline rank 1 with " in out and " of the mean of " in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["parallel.pp=2", "parallel.split=[9,1]"], "parallel.split=[9,1]: adds up to 10"),
        (["parallel.tp=3"], "parallel.tp=3: must divide"),
        (["parallel.pp=2", "parallel.vpp=2"], "parallel.vpp=2: a step has 1 micro-batch,"),
        (["data.batch_size=7", "parallel.dp=2"], "data.batch_size=7"),
        (["data.corpus=stdlib"], "data.corpus=stdlib: changes no memory"),
        (["run.steps=3"], "k3 estimate does not read run"),
        (["parallel.zero=2"], "parallel.zero=2"),
    ],
)
def test_what_training_would_refuse_is_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["estimate", *words]) == 2
    assert says in capsys.readouterr().err
