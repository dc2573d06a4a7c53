"""Checkpoints are whole or absent, complete by name, and never half-loaded."""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from parallel import checkpoint
from parallel.checkpoint import CheckpointError
from parallel.states import ModuleState, RandomState
from tests.parallel.checkpoint_ranks import Bag

ROOT = Path(__file__).parents[2]


def test_round_trip_is_bitwise(tmp_path):
    kept = {
        "weight": torch.randn(3, 5, dtype=torch.float64),
        "half": torch.randn(4).bfloat16(),
        "odd": torch.tensor([float("nan"), -0.0, float("inf")]),
        "view": torch.arange(12).view(3, 4).t(),
        "step": torch.tensor(7),
        "empty": torch.empty(0),
    }
    path = checkpoint.save(tmp_path, 7, {"bag": Bag(**kept)}, {"position": 7, "run": "x"})
    other = Bag(**{name: torch.zeros_like(t) for name, t in kept.items()})
    state = checkpoint.load(path, {"bag": other})
    assert (state["position"], state["run"], state["step"]) == (7, "x", 7)
    for name, tensor in kept.items():
        got = other.tensors[name]
        assert got.dtype == tensor.dtype and got.shape == tensor.shape
        assert got.contiguous().reshape(-1).view(torch.uint8).equal(tensor.contiguous().reshape(-1).view(torch.uint8)), name


def test_module_loads_in_place(tmp_path):
    module = nn.Linear(3, 2)
    path = checkpoint.save(tmp_path, 1, {"model": ModuleState(module)}, {})
    other = nn.Linear(3, 2)
    pointer = other.weight.data_ptr()
    checkpoint.load(path, {"model": ModuleState(other)})
    assert other.weight.data_ptr() == pointer
    assert torch.equal(other.weight, module.weight) and torch.equal(other.bias, module.bias)


def test_tensors_of_one_flat_buffer_are_saved_apart(tmp_path):
    flat = torch.arange(10.0)
    path = checkpoint.save(tmp_path, 1, {"bag": Bag(a=flat[:4].view(2, 2), b=flat[4:])}, {})
    other = Bag(a=torch.zeros(2, 2), b=torch.zeros(6))
    checkpoint.load(path, {"bag": other})
    assert torch.equal(other.tensors["b"], flat[4:])


def test_random_state_continues_to_the_draw(tmp_path):
    def draws():
        return torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()

    draws()
    path = checkpoint.save(tmp_path, 3, {"random": RandomState()}, {})
    expected = [draws(), draws()]
    draws()
    checkpoint.load(path, {"random": RandomState()})
    assert [draws(), draws()] == expected


def test_every_difference_is_named_and_nothing_is_loaded(tmp_path):
    path = checkpoint.save(
        tmp_path, 1, {"a": Bag(x=torch.ones(2), y=torch.ones(3), z=torch.ones(1)), "b": Bag(w=torch.ones(1))}, {}
    )
    b = Bag(w=torch.zeros(1))
    other = Bag(x=torch.zeros(2), y=torch.zeros(4), z=torch.zeros(1, dtype=torch.float64), new=torch.zeros(1))
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(path, {"b": b, "a": other})
    message = str(error.value)
    assert "a: new: missing" in message and "a: y: stored float32[3], here float32[4]" in message
    assert "a: z: stored float32[1], here float64[1]" in message
    assert b.tensors["w"].item() == 0, "b fitted, but a did not: nothing may be loaded"
    with pytest.raises(CheckpointError, match="b: stored, but nothing here takes it"):
        checkpoint.load(path, {"a": Bag(x=torch.ones(2), y=torch.ones(3), z=torch.ones(1))})
    with pytest.raises(CheckpointError, match="c: not stored"):
        checkpoint.load(path, {"a": Bag(x=torch.ones(2), y=torch.ones(3), z=torch.ones(1)), "b": b, "c": Bag()})
    with pytest.raises(CheckpointError, match="a: z: only in the checkpoint"):
        checkpoint.load(path, {"a": Bag(x=torch.ones(2), y=torch.ones(3)), "b": b})


def test_a_damaged_file_is_refused(tmp_path):
    path = checkpoint.save(tmp_path, 1, {"a": Bag(x=torch.ones(200))}, {})
    file = path / "a.safetensors"
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.safetensors: damaged"):
        checkpoint.load(path, {"a": Bag(x=torch.zeros(200))})
    file.unlink()
    with pytest.raises(CheckpointError, match=r"a\.safetensors: missing"):
        checkpoint.load(path, {"a": Bag(x=torch.zeros(200))})


def test_keep_last_and_latest(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    for step in (1, 9, 10, 11):
        checkpoint.save(tmp_path, step, {"a": Bag(x=torch.ones(1) * step)}, {}, keep_last=2)
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["step_10", "step_11"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step_11"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_10", "step_11"]


def test_latest_must_name_a_finished_checkpoint(tmp_path):
    path = checkpoint.save(tmp_path, 1, {"a": Bag(x=torch.ones(1))}, {})
    (path / "state.json").unlink()
    with pytest.raises(CheckpointError, match="step_1, which is no finished checkpoint"):
        checkpoint.latest(tmp_path)


def test_another_format_is_refused(tmp_path):
    path = checkpoint.save(tmp_path, 1, {"a": Bag(x=torch.ones(1))}, {})
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        checkpoint.load(path, {"a": Bag(x=torch.ones(1))})


@pytest.mark.parametrize("moment", ["save_file", "_verify", "os.rename", "os.replace"])
def test_a_process_killed_while_it_saves_leaves_the_previous_checkpoint(tmp_path, moment):
    program = f"""
        import os, signal, sys, torch
        sys.path.insert(0, {str(ROOT)!r})
        from parallel import checkpoint
        class Bag:
            def __init__(self, value): self.value = value
            def state_dict(self): return {{"x": torch.full((1000,), self.value)}}
        from pathlib import Path
        checkpoint.save(Path(sys.argv[1]), 1, {{"a": Bag(1.0)}}, {{}})
        def die(*a, **k): os.kill(os.getpid(), signal.SIGKILL)
        *home, name = {moment!r}.split(".")
        setattr(checkpoint.os if home else checkpoint, name, die)
        checkpoint.save(Path(sys.argv[1]), 2, {{"a": Bag(2.0)}}, {{}})
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program), str(tmp_path)], env={**os.environ})
    assert done.returncode == -signal.SIGKILL
    assert checkpoint.latest(tmp_path) == tmp_path / "step_1"
    bag = Bag(x=torch.zeros(1000))
    checkpoint.load(checkpoint.latest(tmp_path), {"a": bag})
    assert bag.tensors["x"][0] == 1
    checkpoint.save(tmp_path, 2, {"a": Bag(x=torch.full((1000,), 3.0))}, {})
    checkpoint.load(checkpoint.latest(tmp_path), {"a": bag})
    assert bag.tensors["x"][0] == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_1", "step_2"]


def test_each_rank_has_its_own_files_and_gets_them_back(tmp_path, helper):
    one, two = helper.run_ranks("tests.parallel.checkpoint_ranks:save", 2, str(tmp_path))
    assert (one["got"], two["got"]) == (0.0, 10.0) and one["failure"] is None
    assert one["facts"] == two["facts"] and one["facts"]["position"] == 3, "rank 0's facts"
    assert one["facts"]["layout"]["dp"] == 2 and list(one["facts"]["files"]) == ["rank_0000/bag", "rank_0001/bag"]
    there = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    expected = ["latest", "step_3/rank_0000/bag.safetensors", "step_3/rank_0001/bag.safetensors", "step_3/state.json"]
    assert there == expected
    for result in one, two:
        assert "another parallel layout (parallel.zero: 1 there, 0 here)" in result["refusal"]
    with pytest.raises(CheckpointError, match=r"parallel\.dp: 2 there, 1 here"):
        checkpoint.load(tmp_path / "step_3", {"bag": Bag(x=torch.zeros(300))})


def test_what_one_rank_cannot_read_no_rank_loads(tmp_path, helper):
    for result in helper.run_ranks("tests.parallel.checkpoint_ranks:save", 2, str(tmp_path), "file"):
        assert result["got"] == 0 and "rank 1: bag.safetensors: damaged" in result["failure"]


def test_what_one_rank_cannot_write_is_no_checkpoint(tmp_path, helper):
    for result in helper.run_ranks("tests.parallel.checkpoint_ranks:save", 2, str(tmp_path), "disk"):
        assert result == {"failure": "rank 1: bag.safetensors: no such luck"}
    assert checkpoint.latest(tmp_path) is None
