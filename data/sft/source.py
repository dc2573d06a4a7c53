"""Where conversations come from: .jsonl files, or anything that can be gone through twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from data.chat.messages import ChatError, Conversation, loads
from data.chat.openai import conversation
from data.errors import DataError


@dataclass(frozen=True)
class Source:
    """Conversations under a name. `read` begins anew at each call and gives the same ones; `fingerprint` changes when they do."""

    name: str  # for messages: the setting and its value, for example "data.chat.path=chats.jsonl"
    fingerprint: str
    read: Callable[[], Iterable[tuple[str, Conversation]]]  # (where it stands, for messages; the conversation)


def made(name: str, fingerprint: str, conversations: Callable[[], Iterable[Conversation]]) -> Source:
    """A source of conversations that a program makes, numbered from 0 in messages."""
    return Source(name, fingerprint, lambda: ((f"conversation {i}", c) for i, c in enumerate(conversations())))


def from_jsonl(path: str, setting: str = "data.chat.path") -> Source:
    """The conversations of one .jsonl or of every .jsonl below a folder, in the order of names.

    Raises DataError if there are none; reading raises it at the first line that is not a conversation, with its number.
    """
    name = f"{setting}={path}"
    root = Path(path).expanduser()
    try:
        if not root.exists():
            raise DataError(f"{name}: no such file or folder; give a .jsonl of conversations, or a folder of them")
        files = [root]
        if root.is_dir():
            found = sorted((p for p in root.rglob("*.jsonl") if p.is_file()), key=lambda p: p.relative_to(root).as_posix())
            files = [p for p in found if not any(part.startswith(".") for part in p.relative_to(root).parts)]
        if not any(p.stat().st_size for p in files):
            raise DataError(f'{name}: holds no conversation; give a .jsonl with {{"messages": [...]}} on each line')
        digest = blake2b(digest_size=16)
        for p in files:
            stat = p.stat()
            digest.update(f"{p.relative_to(root)}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    except OSError as problem:
        raise DataError(f"{name}: {problem}; change its permissions or give another path") from None
    return Source(name, digest.hexdigest(), lambda: _read(files, name))


def _read(files: list[Path], name: str) -> Iterator[tuple[str, Conversation]]:
    for path in files:
        try:
            file = path.open("rb")
        except OSError as problem:
            raise DataError(f"{name}: cannot read {path} ({problem.strerror}); change its permissions") from None
        with file:
            for number, raw in enumerate(file, start=1):
                if raw.strip():
                    where = f"line {number} of {path}"
                    try:
                        yield where, conversation(_row(raw))
                    except ChatError as problem:
                        raise DataError(f"{name}: {where}: {problem}") from None


def _row(raw: bytes) -> object:
    try:
        return loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise ChatError("is not utf-8; convert the file, for example with iconv -t utf-8") from None
    except ValueError as problem:
        raise ChatError(f'is not JSON ({problem}); every line must be an object like {{"messages": [...]}}') from None
