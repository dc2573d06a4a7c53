"""Structure and text one after the other, with the position of each: what `parse` reads from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from data.chat.messages import Malformed
from data.chat.render import Piece, header
from data.tokenizer import CLOSE, OPEN, SEP, Tokenizer

_HEADER = re.compile(r'([a-z]+)((?: [a-z]+="[^"]*")*)')
_ATTRIBUTE = re.compile(r' ([a-z]+)="([^"]*)"')


@dataclass(frozen=True)
class Item:
    text: str
    structure: bool
    at: int


def from_ids(ids: Sequence[int], tokenizer: Tokenizer) -> Reader:
    """Reads ids; positions are tokens. Raises Malformed, when it gets there, for an id that is neither structure nor text."""
    return Reader(_items(ids, tokenizer), len(ids), "token")


def from_pieces(pieces: Iterable[Piece]) -> Reader:
    """Reads pieces; positions are characters of their joined text."""
    items: list[Item] = []
    at = 0
    for piece in pieces:
        if not piece.structure and items and not items[-1].structure:
            items[-1] = Item(items[-1].text + piece.text, False, items[-1].at)
        elif piece.text:
            items.append(Item(piece.text, piece.structure, at))
        at += len(piece.text)
    return Reader(iter(items), at, "character")


def _items(ids: Sequence[int], tokenizer: Tokenizer) -> Iterator[Item]:
    structure, special = tokenizer.structure().spellings(), tokenizer.special_ids()
    first, run = 0, [int(i) for i in ids]
    for at, i in enumerate(run):
        if i in special or not 0 <= i < tokenizer.vocab_size:
            if first < at:
                yield Item(tokenizer.decode(run[first:at]), False, first)
            if i not in structure:
                name = f"the special token {tokenizer.decode([i])}" if i in special else f"id {i}, which the tokenizer lacks"
                raise Malformed(at, "token", "text or structure", name)
            yield Item(structure[i], True, at)
            first = at + 1
    if first < len(run):
        yield Item(tokenizer.decode(run[first:]), False, first)


class Reader:
    """Every method reads on or raises Malformed."""

    def __init__(self, items: Iterator[Item], end: int, unit: str):
        self._items, self._end, self._unit = items, end, unit
        self._ahead: Item | None = None
        self._fetched = False

    def _peek(self) -> Item | None:
        if not self._fetched:
            self._ahead, self._fetched = next(self._items, None), True
        return self._ahead

    def _take(self) -> None:
        self._fetched = False

    @property
    def ended(self) -> bool:
        return self._peek() is None

    @property
    def position(self) -> int:
        item = self._peek()
        return self._end if item is None else item.at

    def at(self, token: str) -> bool:
        """Whether this structure token comes next."""
        item = self._peek()
        return item is not None and item.structure and item.text == token

    def structure(self, token: str) -> None:
        if not self.at(token):
            self.fail(token)
        self._take()

    def text(self) -> str:
        """The text up to the next structure token; may be empty."""
        item = self._peek()
        if item is None or item.structure:
            return ""
        self._take()
        return item.text

    def element(self) -> tuple[str, dict[str, str]]:
        """[open] tag key="value" ... [sep]: (tag, attributes)."""
        self.structure(OPEN)
        at, text = self.position, self.text()
        self.structure(SEP)
        match = _HEADER.fullmatch(text)
        if match is None:
            self.fail('tag key="value" ...', at, repr(text[:80]))
        attributes = {k: v.replace("&quot;", '"').replace("&amp;", "&") for k, v in _ATTRIBUTE.findall(match[2])}
        if header(match[1], attributes) != text:  # a key twice, or & by itself
            self.fail('distinct keys, and & and " of a value written &amp; and &quot;', at, repr(text[:80]))
        return match[1], attributes

    def open(self, tag: str, names: tuple[str, ...] | None = None) -> dict[str, str]:
        """The opening of this element; its attributes must have these names, in order (None: as may be, for messages)."""
        at = self.position
        found, attributes = self.element()
        if found != tag or (names is None and tag != "message" and attributes) or names not in (None, tuple(attributes)):
            self.fail(" ".join([OPEN + tag, *(names or ())]), at, OPEN + self.shown(found, attributes))
        return attributes

    def close(self, tag: str) -> None:
        """[close] tag [sep]."""
        self.structure(CLOSE)
        at = self.position
        if (found := self.text()) != tag:
            self.fail(f"{tag} to be closed", at, repr(found[:80]))
        self.structure(SEP)

    def shown(self, tag: str, attributes: Mapping[str, str]) -> str:
        return header(tag, attributes)[:80]

    def fail(self, expected: str, at: int | None = None, found: str | None = None) -> NoReturn:
        """Raises Malformed here, or at `at`."""
        if found is None:
            item = self._peek()
            found = "the end" if item is None else item.text if item.structure else repr(item.text[:40])
        raise Malformed(self.position if at is None else at, self._unit, expected, found)
