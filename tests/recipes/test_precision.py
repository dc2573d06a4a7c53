"""precision=fp8|mxfp8 where they cannot be honoured: a line a reason, naming the hardware, the package or the size in the way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from k3.low_precision import LowPrecision
from recipes.compose import compose
from recipes.config import Precision
from recipes.errors import UserError
from recipes.precision import unfit
from recipes.training import train
from tests.k3 import te_standin
from tests.recipes.small_run import do, metrics, stored, words, write_corpus

FP8, MXFP8 = LowPrecision.fp8, LowPrecision.mxfp8
SMALL = ("model=small", "data.seq_length=512", "data.batch_size=4")


def refusal(*words: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        compose(words)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("kind", "capability", "says"),
    [
        (FP8, (9, 0), None),
        (MXFP8, (10, 0), None),
        (MXFP8, (10, 3), None),
        (FP8, None, "Hopper"),
        (MXFP8, None, "Blackwell"),
        (FP8, (8, 0), "give precision=bf16"),
        (FP8, (10, 0), "give precision=mxfp8"),
        (MXFP8, (9, 0), "this GPU has 9.0; give precision=fp8"),
        (MXFP8, (12, 0), "from compute capability 12.0 on"),
        (FP8, (12, 1), "give precision=bf16"),
    ],
)
def test_which_gpu_takes_which(kind: LowPrecision, capability: tuple[int, int] | None, says: str | None):
    reason = unfit(kind, capability, None)
    assert reason is None if says is None else says in str(reason) and "give precision=" in str(reason)


def test_the_library_has_the_last_word():
    assert "CUDA >= 12.9" in str(unfit(FP8, (9, 0), "says: needs CUDA >= 12.9"))


@pytest.mark.parametrize("kind", LowPrecision)
def test_a_cpu_is_refused_with_what_it_takes(kind: LowPrecision):
    (line,) = refusal(f"precision={kind.value}", *SMALL)
    assert line.startswith(f"precision={kind.value}: needs a GPU of compute capability") and line.endswith("give precision=bf16")
    assert "pip install" in line and "transformer_engine[pytorch,core_cu13]" in line


def test_sizes_off_the_grid_are_named():
    _, matrices, batch = refusal(
        "precision=mxfp8", "model=small", "model.moe.expert_size=440", "data.seq_length=30", "data.batch_size=1"
    )
    assert "multiples of 32 on each tensor rank" in matrices and "experts.gate_up among them with 880 x 512" in matrices
    assert "a micro-batch has 30 on a rank" in batch
    assert len(refusal("precision=fp8", "model=nano", "data.seq_length=32")) == 1  # on the grid of 16: the hardware alone
    assert len(refusal("precision=mxfp8", "model=nano", "data.seq_length=32")) == 2


def test_sizes_are_those_of_a_rank():
    cut = ("precision=fp8", *SMALL, "parallel.tp=8", "parallel.cp=2")
    assert len(refusal(*cut)) == 1
    assert "a micro-batch has 8 on a rank" in refusal(*cut, "data.seq_length=128", "data.micro_batch_size=1")[1]
    lines = refusal("precision=mxfp8", *SMALL, "parallel.tp=0")
    assert [line.split(":")[0] for line in lines] == ["parallel.tp=0", "precision=mxfp8"]  # and nothing is divided by it


def test_what_is_compared_is_held_against_the_grid_too():
    words = ("precision=mxfp8", *SMALL)
    assert len(refusal(*words)) == 1
    assert "run.compare_dense" in refusal(*words, "run.compare_dense=0.5")[1]


def test_the_command_says_so_and_exits_with_2():
    program = [str(Path(sys.executable).parent / "k3"), "pretrain", "precision=mxfp8", *SMALL]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.startswith("k3: precision=mxfp8: needs a GPU")


def test_a_whole_run_quantises_and_leaves_what_bf16_leaves(tmp_path: Path):
    """The main path with the stand-in for Transformer Engine, past the refusal that a CPU meets."""
    write_corpus(tmp_path / "corpus")
    grid = [f"model.mla.{name}=32" for name in ("q_lora_rank", "kv_lora_rank", "nope_dim", "rope_dim", "v_dim")]
    more = (*grid, "run.steps=2", "run.sample_tokens=3", "precision=bf16")
    code, plain = do(tmp_path, "plain", *more)
    cfg = compose(words(tmp_path, "low", *more))
    cfg.precision.name = Precision.mxfp8
    with te_standin.installed() as record:
        assert (code, train(cfg)) == (0, 0)
    products = [recipe for module, recipe in record.ran if isinstance(module, te_standin.Linear | te_standin.GroupedLinear)]
    assert products and set(products) == {te_standin.MXFP8BlockScaling(te_standin.Format.E4M3)}
    low = tmp_path / "low"
    ours, wanted = metrics(low), metrics(plain)
    assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in wanted], rel=0.01)
    assert ours[-1]["heldout_loss"] == pytest.approx(wanted[-1]["heldout_loss"], rel=0.01)
    (one, other) = (sorted(folder.glob("checkpoints/*"))[-1] for folder in (low, plain))
    tensors, same = stored(one), stored(other)
    assert {n: (t.shape, t.dtype) for n, t in tensors.items()} == {n: (t.shape, t.dtype) for n, t in same.items()}
