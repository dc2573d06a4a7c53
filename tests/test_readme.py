"""Every command of the README exists and takes its words; what they do is tested elsewhere and by the main job."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from recipes import cli
from recipes.compose import compose
from recipes.phases import PHASES
from recipes.prove import check

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCKS = "\n".join(re.findall(r"^```\n(.*?)^```", TEXT, flags=re.M | re.S))
COMMANDS = [line.split("#")[0].strip() for line in BLOCKS.splitlines() if line.strip()]
INLINE = re.findall(r"`(k3 [a-z]+[^`]*)`", TEXT)


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 8 and any(c.startswith("make pretrain") for c in COMMANDS)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make ")] + ["make lint", "make bench", "make install"])
def test_make_targets_exist(command: str) -> None:
    subprocess.run(["make", "-n", *command.split()[1:]], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("command", [c for c in COMMANDS + INLINE if set(c.split()[1:2]) & {*PHASES, "eval"} and ("pretrain" in c or "=" in c)])
def test_commands_that_train_are_taken(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    verb, *words = shlex.split(command)[1:]
    if "/path/to" in command or "runs/NAME" in command:  # the reader's own paths: the key must exist
        assert all(cli.main([verb, word, "--cfg", "job"]) in (0, 2) for word in words)
        said = capsys.readouterr().err
        assert not re.search("there is no key|does not read|no such", said.replace("no such folder", "").replace("no such file", ""))
    elif any(word.startswith("--") for word in words):
        assert cli.main([verb, *words]) == 0
    else:
        compose(words, verb)


@pytest.mark.parametrize("command", [c for c in COMMANDS + INLINE if c.startswith("k3 prove ")])
def test_prove_commands_are_taken(command: str) -> None:
    check(compose(shlex.split(command)[2:], job="prove"))


@pytest.mark.parametrize("command", [c for c in COMMANDS + INLINE if c.startswith("k3 submit ") and "runs/NAME" not in c])
def test_submit_commands_are_taken(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command)[2:]
    if any("=" in word for word in words):
        assert cli.main(["submit", *dict.fromkeys([*words, "submit.dry_run=true"])]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("command", [c for c in COMMANDS + INLINE if c.startswith("k3 estimate ")])
def test_estimate_commands_run(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(shlex.split(command)[1:]) == 0
    assert ("k3 pretrain " if "search=true" in command else "worst: pipeline rank") in capsys.readouterr().out


@pytest.mark.parametrize("command", [c for c in COMMANDS + INLINE if not c.startswith(("k3 pretrain", "make "))])
def test_other_verbs_exist(command: str) -> None:
    verb = shlex.split(command)[1]
    assert verb in cli.VERBS or verb == "VERB"


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`([a-z0-9_]+/(?:[a-z0-9_]+/)*(?:[a-z0-9_]+\.py)?)`", TEXT)) - {"runs/", "hf/"})
)
def test_paths_exist(path: str) -> None:
    assert (ROOT / path).exists()
