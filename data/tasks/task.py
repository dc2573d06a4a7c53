"""A question with an answer that a program can check, and the side that its prompt is on."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any


@dataclass(frozen=True)
class Task:
    """`id` names the task for good: equal ids, equal tasks. `metadata` is plain JSON.

    metadata of a generator's task: generator, parameters, index, own_score (reasoning-gym scores it by a rule of its own).
    metadata of a line of the user's: messages, reward, tests, where given.
    """

    id: str
    prompt: str
    answer: str
    domain: str
    metadata: dict[str, Any] = field(default_factory=dict)


def normalised(text: str) -> str:
    """What two answers are compared by: NFKC, case folded, white space collapsed, without one full stop at the end."""
    text = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return text[:-1].rstrip() if text.endswith(".") else text


def place(prompt: str) -> float:
    """A number in [0, 1) that depends on the words of the prompt alone, on every machine: the side it is on."""
    digest = blake2b(" ".join(prompt.split()).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def occurs(answer: str, prompt: str) -> bool:
    """Whether the answer stands in the prompt as a word or words of its own, so that copying could hit it."""
    answer, prompt = normalised(answer), normalised(prompt)
    return bool(answer) and re.search(rf"(?<![\w.]){re.escape(answer)}(?!\w|\.\d)", prompt) is not None
