"""A corpus is a sorted list of files; a document is one text file, or one line of a .jsonl.

`Corpus.open` lists (cheap: no text is read), `Corpus.documents` reads. Names are relative to the corpus, so that a split made by
hashing them is the same on every machine.
"""

from __future__ import annotations

import codecs
import json
import logging
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from data.config import DataConfig
from data.errors import DataError

log = logging.getLogger(__name__)

# Files with these endings are meant as text: one that is not utf-8 is an error. Others are taken if they turn out to be utf-8.
_TEXT = frozenset(
    ".c .cc .cfg .cpp .css .csv .go .h .hpp .htm .html .ini .java .js .json .md .py .pyi .rs .rst .sh .sql .tex .text .toml .ts "
    ".tsv .txt .xml .yaml .yml".split()
)
_NOT_SOURCE = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})
_SNIFF = 8192  # bytes that decide whether a file of unknown ending is text
SETTING = "data.corpus"


@dataclass(frozen=True)
class Document:
    name: str  # relative to the corpus; "part.jsonl:17" for a line (from 1) of a .jsonl
    text: str  # never empty


@dataclass(frozen=True)
class Source:
    """A file of the corpus. `size` in bytes, `mtime_ns` in nanoseconds."""

    name: str
    path: Path
    size: int
    mtime_ns: int

    @property
    def is_jsonl(self) -> bool:
        return self.path.suffix.lower() == ".jsonl"


@dataclass(frozen=True)
class Corpus:
    setting: str  # what the user typed
    sources: tuple[Source, ...]
    lenient: bool  # the standard library holds deliberately broken files: those are left out, not reported
    ignored: int = 0  # visible files that are not text

    @classmethod
    def open(cls, setting: str) -> Corpus:
        """Lists the files of "stdlib", a folder, a .jsonl or a text file. Raises DataError if there are none."""
        try:
            return cls._open(setting)
        except OSError as problem:
            raise DataError(f"{SETTING}={setting}: {problem}; change its permissions or give another path") from None

    @classmethod
    def _open(cls, setting: str) -> Corpus:
        if setting == "stdlib":
            root = Path(sysconfig.get_paths()["stdlib"])
            if not root.is_dir():
                raise DataError(f"{SETTING}=stdlib: this Python has no library folder at {root}; give a folder of text instead")
            found, ignored = _walk(root)
            sources = tuple(s for s in found if s.path.suffix == ".py")
        else:
            root = Path(setting).expanduser()
            if not setting or not root.exists():
                raise DataError(f"{SETTING}={setting}: no such file or folder; give a folder of text, a .jsonl, or stdlib")
            sources, ignored = _walk(root) if root.is_dir() else ((_source(root, root.name),), 0)
        if not any(s.size for s in sources):
            raise DataError(
                f"{SETTING}={setting}: no text in it; give a folder with utf-8 text files (hidden files and compressed or "
                'binary ones do not count), or a .jsonl with a "text" field on each line'
            )
        return cls(setting, sources, lenient=setting == "stdlib", ignored=ignored)

    @property
    def bytes(self) -> int:
        return sum(s.size for s in self.sources)

    def fingerprint(self) -> str:
        """Changes when a file comes, goes, or changes its size or modification time."""
        digest = blake2b(digest_size=16)
        for s in self.sources:
            digest.update(f"{s.name}\0{s.size}\0{s.mtime_ns}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def documents(self, *, tell: bool = False) -> Iterator[Document]:
        """Every document with text in it, by name; `tell` logs what is left out. Raises DataError at the first bad one."""
        skipped = self.ignored
        for source in self.sources:
            if source.is_jsonl:
                yield from _lines(source, self.setting)
                continue
            raw = _read(source.path, self.setting)
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError as problem:
                if not self.lenient and source.path.suffix.lower() in _TEXT:
                    raise DataError(
                        f"{SETTING}={self.setting}: {source.path} is not utf-8 (byte {problem.start}); convert it, for example "
                        f"with iconv -t utf-8, or move it out of the corpus"
                    ) from None
                skipped += 1
                continue
            if text.strip():
                yield Document(source.name, text)
        if skipped and tell and not self.lenient:
            log.warning("%s=%s: left out %d files that are not utf-8 text", SETTING, self.setting, skipped)


def documents(cfg: DataConfig) -> Iterator[Document]:
    """Every document of `cfg.corpus` with text in it, in the order of names. Raises DataError."""
    return Corpus.open(cfg.corpus).documents()


def name_hash(name: str, salt: str = "") -> float:
    """A number in [0, 1) that depends on the name and the salt alone, on every machine."""
    digest = blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8, key=salt.encode()).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


class Split:
    """Which documents are held out: those whose name hashes below the fraction, and at least one on each side."""

    def __init__(self, fraction: float, names: Iterator[str], setting: str):
        """Reads all names once. Raises DataError if there are fewer than two documents."""
        self._fraction = fraction
        self.documents = held = 0
        low, high = (2.0, ""), (-1.0, "")
        for name in names:
            here = (name_hash(name), name)
            self.documents += 1
            held += here[0] < fraction
            low, high = min(low, here), max(high, here)
        if self.documents < 2:
            raise DataError(
                f"{SETTING}={setting}: holds {self.documents} document(s) with text; training and held-out need one each at "
                'least: give several files, or a .jsonl with one {"text": ...} a line'
            )
        self._forced = {low[1]: True} if held == 0 else {high[1]: False} if held == self.documents else {}

    def is_heldout(self, name: str) -> bool:
        return self._forced.get(name, name_hash(name) < self._fraction)


def _walk(root: Path) -> tuple[tuple[Source, ...], int]:
    """The visible text files below `root`, sorted by name, and how many others. Links are followed, each folder once."""
    found: list[Source] = []
    seen: set[str] = set()
    ignored = 0
    for folder, below, files in os.walk(root, followlinks=True, onerror=_unreadable):
        real = os.path.realpath(folder)
        if real in seen:
            below.clear()
            continue
        seen.add(real)
        below[:] = sorted(b for b in below if not b.startswith(".") and b not in _NOT_SOURCE)
        for file in files:
            path = Path(folder, file)
            if file.startswith(".") or not path.is_file():
                continue
            if _may_be_text(path):
                found.append(_source(path, path.relative_to(root).as_posix()))
            else:
                ignored += 1
    return tuple(sorted(found, key=lambda s: s.name)), ignored


def _unreadable(problem: OSError) -> None:
    raise DataError(f"{SETTING}: cannot read {problem.filename} ({problem.strerror}); change its permissions or move it out")


def _source(path: Path, name: str) -> Source:
    stat = path.stat()
    return Source(name, path, stat.st_size, stat.st_mtime_ns)


def _may_be_text(path: Path) -> bool:
    if path.suffix.lower() in _TEXT or path.suffix.lower() == ".jsonl":
        return True
    with path.open("rb") as file:
        head = file.read(_SNIFF)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # a character cut at the end is fine
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


def _read(path: Path, setting: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as problem:
        raise DataError(
            f"{SETTING}={setting}: cannot read {path} ({problem.strerror}); change its permissions or move it out"
        ) from None


def _lines(source: Source, setting: str) -> Iterator[Document]:
    """The documents of a .jsonl, streamed; blank lines are skipped."""
    try:
        file = source.path.open("rb")
    except OSError as problem:
        raise DataError(f"{SETTING}={setting}: cannot read {source.path} ({problem.strerror}); change its permissions") from None
    with file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            text = _text_field(raw, f"{SETTING}={setting}: line {number} of {source.path}")
            if text.strip():
                yield Document(f"{source.name}:{number}", text)


def _text_field(raw: bytes, where: str) -> str:
    try:
        row = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise DataError(f"{where} is not utf-8; convert the file, for example with iconv -t utf-8") from None
    except ValueError as problem:
        raise DataError(f'{where} is not JSON ({problem}); every line must be an object like {{"text": "..."}}') from None
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        has = f"the fields {', '.join(sorted(row)) or '(none)'}" if isinstance(row, dict) else f"a {type(row).__name__}"
        raise DataError(f'{where} has no string field "text" (it holds {has}); rename the field that holds the document')
    try:
        row["text"].encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{where} escapes half a surrogate pair, which is not a character; remove it") from None
    return row["text"]
