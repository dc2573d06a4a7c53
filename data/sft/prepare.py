"""Conversations to token files: ids and targets, training and held-out, made once and then reused (as data/prepare.py)."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from data.chat.messages import Assistant, ChatError, Conversation
from data.chat.render import Rendered, encode, render
from data.config import ChatMode, DataConfig
from data.corpus import Split
from data.errors import DataError
from data.sft.source import Source, from_jsonl
from data.tokenizer import Tokenizer, grouped, load_tokenizer
from data.workshop import once

log = logging.getLogger(__name__)

FORMAT = 2  # raise it when the template's wording or these files change
SPLITS = ("train", "heldout")
_MANIFEST = "manifest.json"
_TOKENIZER = "tokenizer.json"
_BATCH = 1 << 22  # characters that are encoded at once
_TELL = 3.0  # seconds between progress lines
_TYPES = {"ids": np.dtype("<i4"), "targets": np.dtype(bool), "lengths": np.dtype("<i8")}


@dataclass(frozen=True)
class Conversations:
    """A split, end to end: `ids` [N] int32 and `targets` [N] bool (read-only), `lengths` [conversations] int64."""

    ids: np.ndarray
    targets: np.ndarray
    lengths: np.ndarray
    firsts: np.ndarray  # where each begins

    def __len__(self) -> int:
        return len(self.lengths)

    def part(self, index: int, room: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, targets) of conversation `index`, the first `room` tokens of it at most."""
        first = int(self.firsts[index])
        stop = first + min(room, int(self.lengths[index]))
        return self.ids[first:stop], self.targets[first:stop]


@dataclass(frozen=True)
class PreparedChat:
    """A finished preparation. `key` names its content: equal keys mean equal files."""

    folder: Path
    key: str
    manifest: dict[str, Any]

    @property
    def eos(self) -> int:
        """The id that fills empty places."""
        return self.manifest["tokenizer"]["eos"]

    @property
    def vocab_size(self) -> int:
        """Entries of the tokenizer (the model may have more)."""
        return self.manifest["tokenizer"]["vocab_size"]

    @property
    def mode(self) -> ChatMode:
        return ChatMode(self.manifest["made_by"]["mode"])

    def count(self, split: str) -> int:
        """Tokens in "train" or "heldout"."""
        return self.manifest[split]["tokens"]

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.folder / _TOKENIZER)

    def conversations(self, split: str) -> Conversations:
        """The split "train" or "heldout", mapped from its files."""
        ids, targets, saved = (np.memmap(self.folder / f"{split}.{n}", dtype=t, mode="r") for n, t in _TYPES.items())
        lengths = np.array(saved)
        return Conversations(ids, targets, lengths, np.cumsum(lengths) - lengths)


def prepare_chat(
    cfg: DataConfig, tokenizer: Tokenizer, train: Source | None = None, heldout: Source | None = None
) -> PreparedChat:
    """Renders and tokenises conversations, or finds it done under `cfg.cache`.

    `train` and `heldout` default to `cfg.chat.path` and `cfg.chat.heldout`. Without a held-out source, `cfg.heldout_fraction` of
    the training source is held out, by the hash of what stands before a conversation's first answer: no question is in both.
    Raises DataError for conversations, a tokenizer, a cache or a number that cannot be used.
    """
    train, heldout = train or _configured(cfg), heldout or _configured_heldout(cfg)
    tokenizer.structure()
    made_by = {
        "format": FORMAT,
        "mode": cfg.chat.mode.value,
        "train": train.fingerprint,
        "heldout": cfg.heldout_fraction if heldout is None else heldout.fingerprint,
        "tokenizer": tokenizer.digest(),
        "tokenizers": version("tokenizers"),
    }
    key = blake2b(json.dumps(made_by, sort_keys=True).encode(), digest_size=12).hexdigest()
    readable = re.sub(r"[^A-Za-z0-9]+", "-", Path(train.name.rpartition("=")[2]).stem).strip("-")[:32] or "chat"
    folder = Path(cfg.cache).expanduser() / f"{readable}-chat-{key}"

    def build(here: Path) -> None:
        stats = _write(here, cfg, tokenizer, train, heldout)
        tokenizer.save(here / _TOKENIZER)
        about = {"vocab_size": tokenizer.vocab_size, "eos": tokenizer.eos}
        manifest = {
            "key": key,
            "sources": {"train": train.name, "heldout": (heldout or train).name},
            "made_by": made_by,
            "tokenizer": about,
            **stats,
        }
        (here / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")

    return once(folder, lambda: _open(folder, key), build, cfg.cache)


def _configured(cfg: DataConfig) -> Source:
    if cfg.chat.path is None:
        raise DataError('data.chat.path=null: give a .jsonl with {"messages": [...]} on each line, or a folder of them')
    return from_jsonl(cfg.chat.path)


def _configured_heldout(cfg: DataConfig) -> Source | None:
    if cfg.chat.heldout is not None:
        return from_jsonl(cfg.chat.heldout, "data.chat.heldout")
    if not 0 < cfg.heldout_fraction < 1:
        raise DataError(f"data.heldout_fraction={cfg.heldout_fraction}: must lie between 0 and 1, both excluded; 0.05 is usual")
    return None


def _write(here: Path, cfg: DataConfig, tokenizer: Tokenizer, train: Source, heldout: Source | None) -> dict[str, dict[str, int]]:
    began = told = time.monotonic()
    if heldout is None:
        side = _split(cfg, train)
        rows = _rendered(train, cfg.chat.mode, side)
    else:
        _tell_of_shared(train, heldout)
        both = ((train, "train"), (heldout, "heldout"))
        rows = (row for source, name in both for row in _rendered(source, cfg.chat.mode, lambda _, name=name: name))  # type: ignore[misc]
    files = {(s, n): (here / f"{s}.{n}").open("wb") for s in SPLITS for n in _TYPES}
    stats = {s: {"conversations": 0, "tokens": 0, "targets": 0, "reasoning": 0} for s in SPLITS}
    try:
        for group in grouped(rows, lambda row: len(row[1].text), _BATCH):
            for (side_, _, thinks), (ids, targets) in zip(group, encode([r for _, r, _ in group], tokenizer)):
                for name, array in ("ids", ids), ("targets", targets), ("lengths", np.array([len(ids)])):
                    files[side_, name].write(array.astype(_TYPES[name]).tobytes())
                for name, more in (
                    ("conversations", 1),
                    ("tokens", len(ids)),
                    ("targets", int(targets.sum())),
                    ("reasoning", thinks),
                ):
                    stats[side_][name] += more
            if time.monotonic() - told > _TELL:
                told = time.monotonic()
                log.info("data: %d conversations after %.0f s", sum(s["conversations"] for s in stats.values()), told - began)
        for (side_, name), file in files.items():
            file.flush()
            os.fsync(file.fileno())
            stats[side_][f"{name}_bytes"] = file.tell()
    finally:
        for file in files.values():
            file.close()
    for side_, source in ("train", train), ("heldout", heldout or train):
        if not stats[side_]["conversations"]:
            raise DataError(f"{source.name}: holds no {side_} conversation")
    if cfg.chat.mode is ChatMode.thinking and not stats["train"]["reasoning"]:
        log.warning("data.chat.mode=thinking: no conversation of %s has reasoning, so the model learns to think nothing; "
                    "data.chat.mode=instruct leaves thinking out", train.name)  # fmt: skip
    log.info(
        "data: %d + %d conversations, %.2f M training tokens (%.2f M targets) in %.1f s",
        *(stats[s]["conversations"] for s in SPLITS), stats["train"]["tokens"] / 1e6, stats["train"]["targets"] / 1e6,
        time.monotonic() - began,
    )  # fmt: skip
    return stats


def _split(cfg: DataConfig, train: Source) -> Any:
    """Which side a question falls on."""
    questions = [_question(c) for _, c in train.read()]
    if not questions:
        raise DataError(f"{train.name}: holds no conversation, only blank lines")
    if len(set(questions)) < 2:
        raise DataError(
            f"{train.name}: its {len(questions)} conversation(s) ask one question, and training and held-out need one each; give "
            "more conversations, or a file of held-out ones as data.chat.heldout"
        )
    split = Split(cfg.heldout_fraction, iter(questions), train.name)
    return lambda conversation: "heldout" if split.is_heldout(_question(conversation)) else "train"


def _tell_of_shared(train: Source, heldout: Source) -> None:
    """Two files are the user's own choice: what is in both is told, and stays."""
    asked = {_question(c) for _, c in train.read()}
    questions = [_question(c) for _, c in heldout.read()]
    if shared := sum(question in asked for question in questions):
        log.warning(
            "%s: %d of its %d conversations ask what one of %s asks, so the held-out loss is also of what was trained on",
            heldout.name, shared, len(questions), train.name,
        )  # fmt: skip


def _question(conversation: Conversation) -> str:
    """Names what stands before the first answer."""
    messages = conversation.messages
    first = next((i for i, m in enumerate(messages) if isinstance(m, Assistant)), len(messages))
    return blake2b(
        repr(replace(conversation, messages=messages[:first])).encode("utf-8", "surrogatepass"), digest_size=16
    ).hexdigest()


def _rendered(source: Source, mode: ChatMode, side: Any) -> Iterator[tuple[str, Rendered, int]]:
    """(split, rendering, whether there is reasoning in it) of every conversation."""
    for where, conversation in source.read():
        try:
            answers = [m for m in conversation.messages if isinstance(m, Assistant)]
            if not answers:
                raise ChatError("has no assistant message, so there is nothing to learn from it; leave it out")
            yield side(conversation), render(conversation, mode=mode), any(a.think for a in answers)
        except ChatError as problem:
            raise DataError(f"{source.name}: {where}: {problem}") from None


def _open(folder: Path, key: str) -> PreparedChat | None:
    """The finished preparation in `folder`, if its manifest and the sizes of its files say that it is one."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        whole = manifest["key"] == key and (folder / _TOKENIZER).is_file()
        for split in SPLITS:
            for name in _TYPES:
                whole = whole and (folder / f"{split}.{name}").stat().st_size == manifest[split][f"{name}_bytes"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return PreparedChat(folder, key, manifest) if whole else None
