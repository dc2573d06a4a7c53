"""Checkpoints are whole or absent, complete by name, never half-loaded, never trusted, and belong to no layout."""

import errno
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

import parallel
from parallel import checkpoint, checkpoint_file, checkpoint_index, checkpoint_save
from parallel.boxes import Box, rectangles
from parallel.cards import CardTable
from parallel.checkpoint import CheckpointError
from parallel.config import ParallelConfig
from parallel.states import ModuleState, RandomState
from tests.parallel.checkpoint_ranks import Bag, full

ROOT = Path(__file__).parents[2]


@pytest.fixture
def world():
    return parallel.start()


def test_round_trip_is_bitwise(tmp_path, world):
    kept = {
        "weight": torch.randn(3, 5, dtype=torch.float64),
        "half": torch.randn(4).bfloat16(),
        "odd": torch.tensor([float("nan"), -0.0, float("inf")]),
        "view": torch.arange(12).view(3, 4).t(),
        "step": torch.tensor(7),
        "empty": torch.empty(0),
    }
    path = checkpoint.save(tmp_path, 7, {"bag": Bag(**kept)}, {"position": 7, "run": "x"}, world)
    other = Bag(**{name: torch.zeros_like(t) for name, t in kept.items()})
    state = checkpoint.load(path, {"bag": other}, world)
    assert (state["position"], state["run"], state["step"]) == (7, "x", 7)
    for name, tensor in kept.items():
        got = other.tensors[name]
        assert got.dtype == tensor.dtype and got.shape == tensor.shape
        assert got.contiguous().reshape(-1).view(torch.uint8).equal(tensor.contiguous().reshape(-1).view(torch.uint8)), name
    assert other.anew is None


def test_module_loads_in_place(tmp_path, world):
    none = CardTable({}, {})
    module = nn.Linear(3, 2)
    path = checkpoint.save(tmp_path, 1, {"model": ModuleState(module, none, world)}, {}, world)
    other = nn.Linear(3, 2)
    pointer = other.weight.data_ptr()
    checkpoint.load(path, {"model": ModuleState(other, none, world)}, world)
    assert other.weight.data_ptr() == pointer
    assert torch.equal(other.weight, module.weight) and torch.equal(other.bias, module.bias)


def test_a_view_into_a_large_buffer_is_saved_alone(tmp_path, world):
    flat = torch.arange(100_000.0)
    path = checkpoint.save(tmp_path, 1, {"bag": Bag(a=flat[:4].view(2, 2), b=flat[4:10])}, {}, world)
    assert (path / "__0_0.distcp").stat().st_size < 10_000
    other = Bag(a=torch.zeros(2, 2), b=torch.zeros(6))
    checkpoint.load(path, {"bag": other}, world)
    assert torch.equal(other.tensors["b"], flat[4:10])


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (4, 3, 5), (2, 1, 3, 2)])
def test_any_flat_range_is_a_few_rectangles(shape):
    whole = torch.arange(int(np.prod(shape, dtype=int))).view(shape)
    most = 2 * (len(shape) - 1) + 1 if len(shape) > 1 else 1
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            parts = list(rectangles(start, stop, shape))
            found = [whole[tuple(slice(c, c + s) for c, s in zip(*part))].reshape(-1) for part in parts]
            assert torch.equal(torch.cat([torch.empty(0, dtype=torch.long), *found]), torch.arange(start, stop))
            assert len(parts) <= most


def test_random_state_continues_to_the_draw(tmp_path, world):
    def draws():
        return torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()

    draws()
    path = checkpoint.save(tmp_path, 3, {"random": RandomState()}, {}, world)
    expected = [draws(), draws()]
    draws()
    checkpoint.load(path, {"random": RandomState()}, world)
    assert [draws(), draws()] == expected


def test_random_state_of_another_layout_is_drawn_from_what_was_stored():
    def drawn(anew, before):
        torch.manual_seed(5)
        state = RandomState()
        list(state.boxes())
        torch.manual_seed(before)
        np.random.seed(before)
        state.loaded(anew)
        return torch.rand(2).tolist(), random.random(), np.random.rand()

    assert drawn(1, 7) == drawn(1, 8) != drawn(2, 7)


def test_every_difference_is_named_and_nothing_is_loaded(tmp_path, world):
    path = checkpoint.save(
        tmp_path, 1, {"a": Bag(x=torch.ones(2), y=torch.ones(3), z=torch.ones(1)), "b": Bag(w=torch.ones(1))}, {}, world
    )
    b = Bag(w=torch.zeros(1))
    other = Bag(x=torch.zeros(2), y=torch.zeros(4), z=torch.zeros(1, dtype=torch.float64), new=torch.zeros(1))
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(path, {"b": b, "a": other}, world)
    message = str(error.value)
    assert "a.new: missing in the checkpoint" in message and "a.y: stored float32[3], here float32[4]" in message
    assert "a.z: stored float32[1], here float64[1]" in message
    assert b.tensors["w"].item() == 0, "b fitted, but a did not: nothing may be loaded"
    with pytest.raises(CheckpointError, match=r"b\.w: only in the checkpoint"):
        checkpoint.load(path, {"a": Bag(x=torch.ones(2), y=torch.ones(3), z=torch.ones(1))}, world)
    many = Bag(**{f"t{n}": torch.zeros(1) for n in range(25)})
    with pytest.raises(CheckpointError, match="and 6 more") as error:
        checkpoint.load(path, {"a": Bag(x=torch.ones(2), y=torch.ones(3), z=torch.ones(1)), "b": many}, world)
    assert str(error.value).count("missing in the checkpoint") + str(error.value).count("only in") == 20


def flip(path):
    content = bytearray((path / "__0_0.distcp").read_bytes())
    content[-9] ^= 1
    (path / "__0_0.distcp").write_bytes(content)


def links_out(path):
    (path / "__0_0.distcp").rename(path.parent / "elsewhere")
    (path / "__0_0.distcp").symlink_to(path.parent / "elsewhere")


def rewrite(path, change):
    state = json.loads((path / "state.json").read_text())
    change(state)
    (path / "state.json").write_text(json.dumps(state))


def forge(path, index):
    """Puts another index in the place of the checkpoint's, with the right checksum: what an attacker would do."""
    from parallel.checkpoint_folder import entry

    (path / ".metadata").write_bytes(index if isinstance(index, bytes) else pickle.dumps(index))
    rewrite(path, lambda state: state["files"].update({".metadata": entry(path / ".metadata")}))


class Runs:
    def __reduce__(self):
        return os.mkdir, ("run-by-a-pickle",)


def changed(path, change):
    index = checkpoint_index.read(path, checkpoint.facts(path)["files"])
    change(index)
    forge(path, index)


def elsewhere(index):
    for info in index.storage_data.values():
        info.relative_path = "../elsewhere"


def bytes_of_any_kind(index):
    index.state_dict_metadata["a.code"] = BytesStorageMetadata()


def an_object(index):
    index.state_dict_metadata["a.code"] = index.storage_meta


def half(index):
    index.state_dict_metadata["a.x"].size = torch.Size([400])


FAULTS = {
    "truncated": (lambda p: os.truncate(p / "__0_0.distcp", 100), r"__0_0\.distcp: truncated \(100 bytes of [\d,]+\)"),
    "flipped": (flip, r"__0_0\.distcp: damaged \(its checksum differs\)"),
    "missing": (lambda p: (p / "__0_0.distcp").unlink(), r"__0_0\.distcp: missing"),
    "no index": (lambda p: (p / ".metadata").unlink(), r"\.metadata: missing"),
    "link": (links_out, r"__0_0\.distcp: .*a link that leads out of it"),
    "path": (lambda p: rewrite(p, lambda s: s["files"].update({"../latest": {"bytes": 7, "xxh3": ""}})), "not a plain file name"),
    "code": (lambda p: forge(p, Runs()), r"\.metadata: refused: it names \w+\.mkdir, which no index of tensors needs"),
    "no pickle": (lambda p: forge(p, b"nonsense"), r"\.metadata: refused"),
    "leads out": (lambda p: changed(p, elsewhere), r"a\.x: lies in '\.\./elsewhere', which is no part of this checkpoint"),
    "bytes": (lambda p: changed(p, bytes_of_any_kind), r"refused: it names [\w.]+\.BytesStorageMetadata, which no index"),
    "object": (lambda p: changed(p, an_object), r"a\.code: an object that is no tensor"),
    "partial": (lambda p: changed(p, half), r"a\.x: its parts do not make up the whole"),
    "state": (lambda p: (p / "state.json").write_text('{"format": 2'), r"state\.json cannot be read"),
    "lists nothing": (lambda p: rewrite(p, lambda s: s.pop("files")), r"does not list the checkpoint's files"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_one_message_that_says_how_to_go_on(tmp_path, world, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    change, says = FAULTS[name]
    checkpoint.save(tmp_path / "c", 1, {"a": Bag(x=torch.ones(200))}, {}, world)
    path = checkpoint.save(tmp_path / "c", 2, {"a": Bag(x=torch.ones(200))}, {}, world)
    change(path)
    bag = Bag(x=torch.zeros(200))
    with pytest.raises(CheckpointError, match=says) as error:
        checkpoint.load(path, {"a": bag}, world)
    assert f"go on from an earlier one (step_1), write its name into {tmp_path / 'c' / 'latest'}" in str(error.value)
    assert bag.tensors["x"].sum() == 0 and not (tmp_path / "run-by-a-pickle").exists()
    checkpoint.load(tmp_path / "c/step_1", {"a": bag}, world)
    assert bag.tensors["x"].sum() == 200


@pytest.mark.parametrize(("number", "says"), [(1, r"format 1 \(one safetensors file a rank"), (99, "format 99; this version")])
def test_another_format_is_refused(tmp_path, world, number, says):
    path = checkpoint.save(tmp_path, 1, {"a": Bag(x=torch.ones(1))}, {}, world)
    rewrite(path, lambda state: state.update(format=number))
    with pytest.raises(CheckpointError, match=says):
        checkpoint.load(path, {"a": Bag(x=torch.ones(1))}, world)


def test_what_is_kept_and_latest(tmp_path, world):
    assert checkpoint.latest(tmp_path) is None
    saver = checkpoint.Saver(tmp_path, world, keep_last=2, keep_every=10)
    for step in (1, 9, 10, 11, 12, 13):
        saver.save(step, {"a": Bag(x=torch.ones(1) * step)}, {})
    saver.wait()
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["step_10", "step_12", "step_13"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step_13"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_10", "step_12", "step_13"]


def test_a_checkpoint_that_was_removed_by_half_does_not_stay(tmp_path, world, monkeypatch):
    """A kill amid removing leaves nothing that looks like a checkpoint, and the next save of any step clears it away."""
    saver = checkpoint.Saver(tmp_path, world, keep_last=1, asynchronous=False)
    saver.save(1, {"a": Bag(x=torch.ones(1))}, {})
    monkeypatch.setattr(checkpoint_save.disk.shutil, "rmtree", lambda path: (path / "metadata.json").unlink())
    saver.save(2, {"a": Bag(x=torch.ones(1))}, {})
    monkeypatch.undo()
    (hidden,) = [p for p in tmp_path.iterdir() if p.name not in ("latest", "step_2")]
    assert (hidden / "state.json").is_file() and checkpoint.checkpoints(tmp_path) == [tmp_path / "step_2"]
    saver.save(2, {"a": Bag(x=torch.ones(1))}, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_2"]


def test_what_a_kill_left_undone_after_the_last_save_is_done_at_the_end(tmp_path, world):
    """A run that goes on from its last step saves no more: `latest` moves, older ones go, and the checkpoint is not rewritten."""
    for step in (1, 2):
        checkpoint.save(tmp_path, step, {"a": Bag(x=torch.ones(1))}, {}, world)
    (tmp_path / "latest").unlink()
    before = (tmp_path / "step_2").stat()
    checkpoint.save(tmp_path, 2, {"a": Bag(x=torch.zeros(1))}, {}, world, keep_last=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_2"] and (tmp_path / "latest").read_text() == "step_2\n"
    after = (tmp_path / "step_2").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_latest_must_name_a_finished_checkpoint(tmp_path, world):
    path = checkpoint.save(tmp_path / "c", 1, {"a": Bag(x=torch.ones(1))}, {}, world)
    (path / "state.json").unlink()
    with pytest.raises(CheckpointError, match="step_1, which is no finished checkpoint"):
        checkpoint.latest(tmp_path / "c")
    checkpoint.save(tmp_path / "d", 1, {"a": Bag(x=torch.ones(1))}, {}, world)
    (tmp_path / "c/latest").write_text("../d/step_1")
    with pytest.raises(CheckpointError, match="which is no finished checkpoint"):
        checkpoint.latest(tmp_path / "c")


def test_what_is_saved_is_what_was_there_when_save_returned(tmp_path, world, monkeypatch):
    """And `latest` moves when the writer is through, not before."""
    hold = checkpoint_save.threading.Event()
    entry = checkpoint_save.disk.entry
    monkeypatch.setattr(checkpoint_save.disk, "entry", lambda path: hold.wait(30) and entry(path))
    x = torch.ones(1000)
    saver = checkpoint.Saver(tmp_path, world)
    path = saver.save(1, {"a": Bag(x=x)}, {})
    x.zero_()
    saver.poll()
    assert checkpoint.latest(tmp_path) is None and not path.exists()
    hold.set()
    saver.wait()
    assert checkpoint.latest(tmp_path) == path
    bag = Bag(x=torch.zeros(1000))
    checkpoint.load(path, {"a": bag}, world)
    assert bag.tensors["x"].sum() == 1000
    assert saver.timings().keys() == {"checkpoint/stall_seconds", "checkpoint/seconds"} and saver.timings() == {}


def save_and_damage(tensor, stream, saves=torch.save):
    """As a disk that holds another byte than it was given, behind the checksum."""
    at = stream.size
    saves(tensor, stream)
    stream.flush()
    os.pwrite(stream.file.fileno(), b"?", at + 700)


@pytest.mark.parametrize("how", ["write", "read back", "publish", "folder"])
def test_what_fails_in_the_background_is_told_and_leaves_the_previous_checkpoint(tmp_path, world, monkeypatch, how):
    bag = Bag(x=torch.ones(10))
    saver = checkpoint.Saver(tmp_path, world)
    saver.save(1, {"a": bag}, {})
    saver.wait()
    if how == "write":
        monkeypatch.setattr(checkpoint_file.os, "fsync", full)
    elif how == "read back":
        monkeypatch.setattr(checkpoint_save.torch, "save", save_and_damage)
    elif how == "publish":
        monkeypatch.setattr(checkpoint_save.disk.os, "rename", lambda *_: full(0))
    else:  # as when nothing may be written
        monkeypatch.setattr(Path, "mkdir", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EROFS, "Read-only file system")))
    says = {"read back": "differs from what was written", "folder": "Read-only file system"}.get(how, "No space left on device")
    with pytest.raises(CheckpointError, match=rf"step_2 could not be written:\n .*{says}[^$]*last good checkpoint is .*step_1"):
        saver.save(2, {"a": bag}, {})
        saver.wait()
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_1"]
    checkpoint.load(checkpoint.latest(tmp_path), {"a": bag}, world)
    saver.save(2, {"a": bag}, {})
    saver.wait()
    assert checkpoint.latest(tmp_path) == tmp_path / "step_2"


@pytest.mark.parametrize("moment", ["torch.save", "disk.entry", "os.rename", "os.replace"])
def test_a_process_killed_while_it_saves_leaves_the_previous_checkpoint(tmp_path, world, moment):
    program = f"""
        import os, signal, sys, torch
        sys.path.insert(0, {str(ROOT)!r})
        import parallel
        from parallel import checkpoint, checkpoint_folder as disk
        from tests.parallel.checkpoint_ranks import Bag
        from pathlib import Path
        world = parallel.start()
        checkpoint.save(Path(sys.argv[1]), 1, {{"a": Bag(x=torch.full((1000,), 1.0))}}, {{}}, world)
        def die(*a, **k): os.kill(os.getpid(), signal.SIGKILL)
        home, name = {moment!r}.split(".")
        setattr({{"torch": torch, "disk": disk, "os": os}}[home], name, die)
        saver = checkpoint.Saver(Path(sys.argv[1]), world)
        saver.save(2, {{"a": Bag(x=torch.full((1000,), 2.0))}}, {{}})
        saver.wait()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program), str(tmp_path)], env={**os.environ})
    assert done.returncode == -signal.SIGKILL
    assert checkpoint.latest(tmp_path) == tmp_path / "step_1"
    bag = Bag(x=torch.zeros(1000))
    checkpoint.load(checkpoint.latest(tmp_path), {"a": bag}, world)
    assert bag.tensors["x"][0] == 1
    checkpoint.save(tmp_path, 2, {"a": Bag(x=torch.full((1000,), 3.0))}, {}, world)
    checkpoint.load(checkpoint.latest(tmp_path), {"a": bag}, world)
    assert bag.tensors["x"][0] == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_1", "step_2"]


def test_ranks_get_back_their_own_and_other_layouts_cut_anew(tmp_path, helper, world):
    one, two = helper.run_ranks("tests.parallel.checkpoint_ranks:save", 2, str(tmp_path))
    assert (one["got"], two["got"]) == (0.0, 10.0) and one["failure"] is None and one["anew"] is two["anew"] is None
    assert one["facts"] == two["facts"] and one["facts"]["position"] == 3, "rank 0's facts"
    assert one["facts"]["layout"]["dp"] == 2
    whole = torch.arange(35.0).view(7, 5)
    assert torch.equal(torch.cat([one["rows"], two["rows"]]), whole)
    there = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    files = (".metadata", "__0_0.distcp", "__1_0.distcp", "metadata.json", "state.json")
    assert there == ["latest", *(f"step_3/{name}" for name in files)]
    three = helper.run_ranks("tests.parallel.checkpoint_ranks:load", 3, str(tmp_path / "step_3"), ParallelConfig(dp=3))
    assert torch.equal(torch.cat([rank["rows"] for rank in three]), whole)
    assert [(rank["got"], rank["anew"]) for rank in three] == [(0.0, 0), (0.0, 1), (0.0, 2)], "rank 0's, to draw anew from"


def test_boxes_that_overlap_or_leave_a_gap_are_no_checkpoint(tmp_path, world):
    class Gap(Bag):
        def boxes(self):
            yield Box("x", self.tensors["x"], (3,), (1,))

    with pytest.raises(CheckpointError, match=r"a\.x: its parts do not make up the whole"):
        checkpoint.save(tmp_path, 1, {"a": Gap(x=torch.ones(1))}, {}, world)
    assert checkpoint.latest(tmp_path) is None


def test_what_one_rank_cannot_read_no_rank_loads(tmp_path, helper):
    for result in helper.run_ranks("tests.parallel.checkpoint_ranks:save", 2, str(tmp_path), "file"):
        assert result["got"] == 0 and "__1_0.distcp: damaged" in result["failure"]


def test_what_one_rank_cannot_write_is_no_checkpoint(tmp_path, helper):
    for result in helper.run_ranks("tests.parallel.checkpoint_ranks:save", 2, str(tmp_path), "disk"):
        assert "rank 1: [Errno 28] No space left on device" in result["failure"]
    assert checkpoint.latest(tmp_path) is None and not list(tmp_path.iterdir())


def test_what_one_rank_cannot_write_in_the_background_all_ranks_hear_at_the_same_step(tmp_path, helper):
    one, two = helper.run_ranks("tests.parallel.checkpoint_ranks:fails_in_the_background", 2, str(tmp_path))
    assert one == two and len(one) == 1 and "rank 1: [Errno 28]" in one[0] and "last good checkpoint is" in one[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_1"]


@pytest.mark.parametrize(
    "how, says",
    [
        ("outside", "a part of it lies outside of it"),
        ("turned", "a part of it lies outside of it"),
        ("overlap", "its parts do not make up the whole"),
        ("rank", "a part of it lies outside of it"),
        ("no dtype", "has no dtype"),
    ],
)
def test_an_index_that_does_not_hold_together_is_refused(tmp_path, world, how, says):
    """With checksums that fit, as somebody who forges one would give it."""
    path = checkpoint.save(tmp_path, 1, {"a": Bag(x=torch.ones(4, 6))}, {}, world)

    def broken(index):
        entry = index.state_dict_metadata["a.x"]
        (place,) = index.storage_data
        (box,) = entry.chunks
        if how == "outside":
            entry.chunks[0] = replace(box, offsets=torch.Size([9, 0]))
        elif how == "turned":
            entry.size = torch.Size([6, 4])
        elif how == "overlap":
            entry.chunks[:] = [
                replace(box, sizes=torch.Size([2, 6])),
                replace(box, offsets=torch.Size([1, 0]), sizes=torch.Size([2, 6])),
            ]
        elif how == "rank":
            entry.chunks[0] = replace(box, offsets=torch.Size([0]), sizes=torch.Size([24]))
        else:
            entry.properties.dtype = None
        for chunk in entry.chunks:
            index.storage_data[replace(place, offset=chunk.offsets)] = index.storage_data[place]

    changed(path, broken)
    with pytest.raises(CheckpointError, match=says):
        checkpoint_index.read(path, checkpoint.facts(path)["files"])
