"""Facts that are told once and asked later: what rows for long-range recall are made of.

A fact is a line `key WORD WORD = WORD WORD`; asked, it stands there once more, and what follows `=` can be known from the first
place alone. Which keys and values are held out is a matter of their text, so training and evaluation never share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from data.draws import Draws
from data.errors import DataError
from data.tokenizer import Tokenizer

HELDOUT = 8  # of so many keys, and of so many values, one is held out
_ENOUGH = 64  # words
_TRIES = 32 * HELDOUT
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Fact:
    asked: tuple[int, ...]  # tokens up to and with the `=`
    answer: tuple[int, ...]  # tokens behind it, without the line's end
    end: tuple[int, ...]

    @property
    def line(self) -> tuple[int, ...]:
        return self.asked + self.answer + self.end


class Facts:
    """Draws facts in the words of a tokenizer: those that are one token each, or letters where there are few."""

    def __init__(self, tokenizer: Tokenizer):
        found = (tokenizer.decode([i]) for i in range(tokenizer.vocab_size))
        words = sorted({w[1:] for w in found if w[:1] == " " and len(w) > 3 and w[1:].isascii() and w[1:].islower() and w[1:].isalpha()})
        self.words = words if len(words) >= _ENOUGH else sorted({*words, *_LETTERS})
        self._tokenizer = tokenizer
        self._ids: dict[str, tuple[int, ...]] = {}
        self._end = self._encode("\n")

    def draw(self, draws: Draws, count: int, *, heldout: bool) -> list[Fact]:
        """`count` facts whose keys end in different words, or nearly as many where words are few. Raises DataError for more than
        there are words.
        """
        if count > len(self.words):
            raise DataError(f"data.long.facts={count}: the tokenizer has words for {len(self.words)}; give fewer facts")
        found: list[Fact] = []
        for last in draws.order(len(self.words)):
            if len(found) == count:
                break
            key = self._text(draws, " key", self.words[int(last)], heldout)
            value = self._text(draws, " value", None, heldout)
            if key and value:
                found.append(Fact(self._encode("\nkey") + self._encode(key) + self._encode(" ="), self._encode(value), self._end))
        return found

    def _text(self, draws: Draws, what: str, last: str | None, heldout: bool) -> str | None:
        """Two words, of the side of the split that is wanted; None where no first word was found that gives one."""
        for _ in range(_TRIES):
            first, second = (self.words[draws.below(len(self.words))] for _ in range(2))
            text = f" {first} {last or second}"
            if is_heldout(text, what) == heldout:
                return text
        return None

    def _encode(self, text: str) -> tuple[int, ...]:
        if text not in self._ids:
            self._ids[text] = tuple(self._tokenizer.encode(text))
        return self._ids[text]


def is_heldout(text: str, what: str) -> bool:
    return blake2b(text.encode(), digest_size=1, key=what.encode()).digest()[0] % HELDOUT == 0


def plant(
    filler: np.ndarray, told: Sequence[Fact], told_at: Sequence[int], asked: Sequence[Fact], asked_at: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Lines put into a text: (tokens [N], bool [N]: where answers to questions stand).

    filler: tokens; `told_at`, `asked_at`: before which of them each line comes. N is the filler's length and the lines'.
    """
    lines = sorted([(at, False, fact) for at, fact in zip(told_at, told, strict=True)]
                   + [(at, True, fact) for at, fact in zip(asked_at, asked, strict=True)], key=lambda line: line[:2])  # fmt: skip
    tokens: list[np.ndarray] = []
    answers: list[np.ndarray] = []
    here = 0
    for at, is_question, fact in lines:
        tokens += [filler[here:at], np.array(fact.line, dtype=filler.dtype)]
        answer = np.zeros(len(fact.line), dtype=bool)
        answer[len(fact.asked) : len(fact.asked) + len(fact.answer)] = is_question
        answers += [np.zeros(at - here, dtype=bool), answer]
        here = at
    tokens.append(filler[here:])
    answers.append(np.zeros(len(filler) - here, dtype=bool))
    return np.concatenate(tokens), np.concatenate(answers)
