"""SIGKILL at random moments of a run in two processes: every restart continues, and every end is that of the undisturbed run."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel.checkpoint_folder import checkpoints, entry
from recipes.bench.faults import table
from recipes.faults.plan import Kill, Moment, Victim, plan
from recipes.faults.same import differences
from recipes.faults.trial import Faults, Killed, Trial
from tests.recipes.small_run import do, write_corpus

TRIALS = 10


def test_eighteen_seeds_kill_every_victim_at_every_moment() -> None:
    first = [plan(seed)[0] for seed in range(40, 58)]
    assert {(kill.moment, kill.victim) for kill in first} == {(moment, victim) for moment in Moment for victim in Victim}
    for begin in (0, 7):
        ten = [plan(seed)[0] for seed in range(begin, begin + TRIALS)]
        assert {kill.moment for kill in ten} == set(Moment) and {kill.victim for kill in ten} == set(Victim)
    assert plan(3) == plan(3) and len({kill.wait for kill in first}) == 18
    assert {len(plan(seed)) for seed in range(20)} == {1, 2}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("single")
    write_corpus(home / "corpus")
    short = ("model.layers=2", "run.steps=2", "checkpoint.every=0", "run.sample_tokens=0", "run.eval_every=0")
    code, folder = do(home, "run", *short)
    assert code == 0
    return folder


def change_json(path: Path, *keys: str, line: int | None = None) -> None:
    """Moves one number in a file of JSON by as little as it can be moved."""
    lines = path.read_text().splitlines() if line is not None else [path.read_text()]
    value = json.loads(lines[line or 0])
    inner = value
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] += 1 if isinstance(inner[keys[-1]], int) else 1e-15
    lines[line or 0] = json.dumps(value)
    path.write_text("\n".join(lines) + "\n")


def flip(step: Path) -> None:
    """One bit of a tensor of a checkpoint, whose checksum then is the changed file's: nothing but a comparison can see it."""
    file = step / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    state = json.loads((step / "state.json").read_text())
    state["files"][file.name] = entry(file)
    (step / "state.json").write_text(json.dumps(state))


def of_last(folder: Path) -> Path:
    return checkpoints(folder / "checkpoints")[-1]


CHANGES = {
    "loss": (lambda run: change_json(run / "metrics.jsonl", "loss", line=1), "metrics: step 2: loss: "),
    "position": (lambda run: change_json(of_last(run) / "state.json", "data_position"), "state.json: data_position: 3 and 2"),
    "progress": (lambda run: change_json(of_last(run) / "state.json", "progress", "tokens"), "state.json: progress: "),
    "tensor": (lambda run: flip(of_last(run)), " differs"),
    "export": (lambda run: (run / "hf/config.json").write_text("{}"), "hf: "),
    "step": (lambda run: (run / "metrics.jsonl").write_text(""), r"metrics: steps [] and [1, 2]"),
}


def test_a_copy_has_no_differences_and_times_are_none(single: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(single, tmp_path / "copy")
    change_json(copy / "metrics.jsonl", "seconds", line=0)
    change_json(of_last(copy) / "state.json", "progress", "train_seconds")
    assert list(differences(copy, single)) == []


@pytest.mark.parametrize("what", CHANGES)
def test_every_difference_is_seen(single: Path, tmp_path: Path, what: str) -> None:
    change, says = CHANGES[what]
    copy = shutil.copytree(single, tmp_path / "copy")
    change(copy)
    (found,) = differences(copy, single)
    assert says in found


def test_the_table_names_what_went_wrong_and_how_to_try_again(tmp_path: Path) -> None:
    kill = Kill(Moment.writing, Victim.second, 6, 0.5)
    good = Trial(4, tmp_path, [Killed(kill, Moment.writing, 3, 0.25)], seconds=2.0)
    bad = Trial(5, tmp_path, [Killed(kill, Moment.writing, 0), Killed(kill, None)], ["head.weight differs"] * 7, 3.0)
    lines = list(table("bf16", [good, bad]))
    assert "2 trials with 2 kills in 5 s; 1 of 2 ended bitwise" in lines[0]
    (row,) = [line for line in lines if line.startswith("while writing")]
    assert row.split() == ["while", "writing", "rank", "1", "2", "1", "0", "x", "1,", "3", "x", "1"]
    assert "the other rank ended by itself 1 times, after 0.2 s at most" in lines and "1 kills came after" in lines[-8]
    assert "seed 5 went wrong; `k3 bench faults n=1 precision=bf16 seed=5`" in lines[-7]
    assert lines[-6:] == ["  head.weight differs"] * 5 + ["  ... and 2 more"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def fp32(home: Path) -> Faults:
    return Faults(home, "fp32")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("precision", "first"), [("fp32", 0), ("bf16", 8)])
def test_runs_killed_at_ten_moments_end_bitwise_as_the_undisturbed_one(
    home: Path, request: pytest.FixtureRequest, precision: str, first: int
) -> None:
    faults = request.getfixturevalue("fp32") if precision == "fp32" else Faults(home, precision)
    trials = [faults.trial(seed) for seed in range(first, first + TRIALS)]
    print("\n".join(table(precision, trials)))
    assert [(trial.seed, trial.wrong) for trial in trials if trial.wrong] == []
    moments = [killed.moment for trial in trials for killed in trial.kills if killed.moment is not None]
    assert len(moments) >= TRIALS - 1 and len(set(moments)) >= 4, "the kills missed their moments"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("sabotage", "says"),
    [
        (lambda run: flip(of_last(run)), "metrics: step "),
        (lambda run: change_json(of_last(run) / "state.json", "data_position"), "metrics: step "),
        (lambda run: shutil.rmtree(run / "checkpoints"), "went on with step 1, and the last checkpoint was of step [36]"),
        (lambda run: (run / "checkpoints/.step_3.17.partial").mkdir(), ""),
    ],
    ids=["weight", "position", "lost", "stale"],
)
def test_a_restart_that_is_not_the_same_run_is_told(fp32: Faults, sabotage, says: str) -> None:
    """Seed 193 kills after step 7 of 9: there is a checkpoint to go on from, and steps to come. Stale folders of a kill, though,
    are no harm.
    """
    trial = fp32.trial(193, sabotage)
    told = "\n".join(trial.wrong)
    assert trial.kills[0].moment is Moment.before and trial.kills[0].continued in (3, 6)
    assert re.search(says, told) if says else not told, told
