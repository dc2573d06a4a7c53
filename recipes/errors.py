"""What a user did wrong, and how it is said: one message, no traceback, exit code 2."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from enum import Enum


class UserError(Exception):
    """A mistake in what the user typed or gave. The message names the key, the value and the fix."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name that `word` most likely meant, if any; a dotted key also matches by its last part (`lr` -> `optim.lr`)."""
    names = list(known)
    for name in names:
        if name.lower() == word.lower():
            return name
    last = word.rsplit(".", 1)[-1]
    tails = [name for name in names if name.rsplit(".", 1)[-1] == last]
    if tails:
        return difflib.get_close_matches(word, tails, n=1, cutoff=0.0)[0]
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return close[0] if close else None


def suggestion(word: str, known: Iterable[str]) -> str:
    """`; the nearest is X`, or nothing where nothing is near."""
    name = nearest(word, known)
    return f"; the nearest is {name}" if name else ""


def shown(value: object) -> str:
    """A value as the user types it."""
    if isinstance(value, Enum):
        return value.name
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def word(key: str, value: object) -> str:
    """`key=value` as Hydra takes it, in quotes where the value is text with characters that mean something to it."""
    text = shown(value)
    if not isinstance(value, str) or re.fullmatch(r"[\w./-]+", text):
        return f"{key}={text}"
    escaped = re.sub(r'(\\*)("|$)', lambda m: m[1] * 2 + ("\\" + m[2] if m[2] else ""), text)  # a backslash counts before a quote
    return f'{key}="{escaped}"'


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
