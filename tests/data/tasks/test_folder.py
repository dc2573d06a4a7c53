"""The user's jsonl: what is read, and where each mistake is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data.errors import DataError
from data.tasks import Tasks, TasksConfig
from data.tasks.folder import read


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_reads_every_form(tmp_path: Path) -> None:
    write(
        tmp_path / "b.jsonl",
        {"prompt": "2+2?", "answer": 4},
        {"prompt": "Write f.", "tests": "assert f() == 1", "domain": "code"},
    )
    write(
        tmp_path / "a.jsonl",
        {
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
            "answer": "Hello ",
            "reward": "mine.py:f",
            "id": "x",
        },
    )
    first, second, third = read(str(tmp_path))
    assert (first.id, first.prompt, first.answer, first.domain) == ("x", "system: Be brief.\nuser: Hi", "Hello", "a")
    assert first.metadata["reward"] == "mine.py:f" and first.metadata["messages"][1]["content"] == "Hi"
    assert (second.id, second.answer, second.domain, second.metadata) == ("b.jsonl:1", "4", "b", {})
    assert (third.answer, third.domain, third.metadata["reward"]) == ("", "code", "tests")


@pytest.mark.parametrize(
    "row, message",
    [
        ("{", ":2: is not JSON at column 2"),
        ("[]", ":2: is not an object"),
        ("", ":2: an empty line"),
        ({"prompt": "a"}, ":2: answer: not given"),
        ({"prompt": "a", "answer": " "}, ":2: answer: is empty"),
        ({"prompt": "a", "answer": True}, ":2: answer: must be text or a number"),
        ({"prompt": "", "answer": "a"}, ":2: prompt: must be text"),
        ({"answer": "a"}, ":2: give one of prompt and messages"),
        ({"prompt": "a", "answer": "b", "awnser": 1}, ":2: awnser: no such key"),
        ({"messages": [{"role": "bot", "content": "x"}], "answer": "b"}, ":2: messages[0]: must be"),
        ({"messages": [{"role": "assistant", "content": "x"}], "answer": "b"}, ":2: messages: the last must be"),
        ({"prompt": "a", "answer": "b", "id": "good"}, ":2: id 'good' is that of"),
    ],
)
def test_a_mistake_has_its_line(tmp_path: Path, row: object, message: str) -> None:
    good = {"prompt": "q", "answer": "a", "id": "good"}
    file = write(tmp_path / "t.jsonl", good, row, {**good, "id": "last"})
    with pytest.raises(DataError) as error:
        read(str(file))
    assert f"{file}{message}" in str(error.value)


def test_folder_is_shuffled_by_epoch_and_split_by_prompt(tmp_path: Path) -> None:
    write(tmp_path / "t.jsonl", *({"prompt": f"what is {i}?", "answer": i} for i in range(200)))
    tasks = Tasks(TasksConfig(generators=[], folder=str(tmp_path), heldout=100))
    held = {task.prompt for task in tasks.heldout()}
    count = 200 - len(held)
    first, second = ([tasks.train(i + e * count).prompt for i in range(count)] for e in (0, 1))
    assert sorted(first) == sorted(second) and first != second and not held & set(first) and 8 < len(held) < 35


def test_no_jsonl(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no \.jsonl"):
        read(str(tmp_path))
