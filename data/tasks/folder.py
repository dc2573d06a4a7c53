"""Tasks from the user's jsonl: strict, with the file and line of every mistake."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.tasks.task import Task

_KEYS = ("prompt", "messages", "answer", "domain", "reward", "tests", "id")
_ROLES = ("system", "user", "assistant", "tool")


def read(folder: str) -> list[Task]:
    """The tasks of a .jsonl or of every .jsonl below a folder, by file name and line.

    A line: {"prompt": text | "messages": [{"role", "content"}, ...], "answer": text or number, and as wished "domain" (default:
    the file's name), "reward" (a name of `rewards.names`' kind), "tests" (python that raises if the code is wrong), "id"}.
    With tests the answer may be left out. Raises DataError.
    """
    root = Path(folder).expanduser()
    if not root.exists():
        raise DataError(f"tasks.folder={folder}: no such file or folder")
    files = sorted(root.rglob("*.jsonl")) if root.is_dir() else [root]
    files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(root).parts)]
    if not files:
        raise DataError(f"tasks.folder={folder}: holds no .jsonl; each line is one task")
    tasks: list[Task] = []
    seen: dict[str, str] = {}
    for file in files:
        for number, task in _lines(file, file.relative_to(root).as_posix() if root.is_dir() else file.name):
            if task.id in seen:
                raise DataError(f"{file}:{number}: id {task.id!r} is that of {seen[task.id]}, too; give each task its own")
            seen[task.id] = f"{file}:{number}"
            tasks.append(task)
    if not tasks:
        raise DataError(f"tasks.folder={folder}: holds no tasks")
    return tasks


def _lines(file: Path, name: str) -> Iterator[tuple[int, Task]]:
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: is not utf-8 at byte {error.start}") from error
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            if number < len(lines):
                raise DataError(f"{file}:{number}: an empty line; leave it out")
            continue
        try:
            yield number, _task(json.loads(line), f"{name}:{number}", file.stem)
        except json.JSONDecodeError as error:
            raise DataError(f"{file}:{number}: is not JSON at column {error.colno}: {error.msg}") from error
        except _Wrong as error:
            raise DataError(f"{file}:{number}: {error}") from error


class _Wrong(ValueError):
    pass


def _task(row: Any, place: str, domain: str) -> Task:
    if not isinstance(row, dict):
        raise _Wrong('is not an object; give {"prompt": ..., "answer": ...}')
    if unknown := [key for key in row if key not in _KEYS]:
        raise _Wrong(f"{unknown[0]}: no such key; there are {', '.join(_KEYS)}")
    if ("prompt" in row) == ("messages" in row):
        raise _Wrong("give one of prompt and messages")
    for key in ("prompt", "domain", "reward", "tests", "id"):
        if key in row and not (isinstance(row[key], str) and row[key].strip()):
            raise _Wrong(f"{key}: must be text that is not empty")
    answer = row.get("answer")
    if answer is None and "tests" not in row:
        raise _Wrong("answer: not given; only a task with tests needs none")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | None):
        raise _Wrong("answer: must be text or a number")
    if isinstance(answer, str) and not answer.strip():
        raise _Wrong("answer: is empty")
    metadata = {key: row[key] for key in ("messages", "reward", "tests") if key in row}
    if "tests" in row:
        metadata.setdefault("reward", "tests")
    prompt = row["prompt"] if "prompt" in row else _prompt(row["messages"])
    text = "" if answer is None else answer.strip() if isinstance(answer, str) else json.dumps(answer)
    return Task(row.get("id", place), prompt, text, row.get("domain", domain), metadata)


def _prompt(messages: Any) -> str:
    """The conversation as text, for its side and for people."""
    if not isinstance(messages, list) or not messages:
        raise _Wrong("messages: must be a list that is not empty")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in _ROLES or not isinstance(message.get("content"), str):
            raise _Wrong(f'messages[{number}]: must be {{"role": one of {", ".join(_ROLES)}, "content": text}}')
    if messages[-1]["role"] not in ("user", "tool"):
        raise _Wrong("messages: the last must be the user's or a tool's; the assistant's answer is what is asked for")
    only = messages[0]["content"] if len(messages) == 1 else None
    return only if only is not None else "\n".join(f"{m['role']}: {m['content']}" for m in messages)
