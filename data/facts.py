"""Facts that are told once and asked later: what rows for long-range recall are made of.

A fact is a line `key WORD = WORD`; asked, the line comes again, and what follows `=` can be known from its first place alone.
Words are one token where they can be, so that what has to be learnt is the way back and not a spelling. Which facts are held out
is a matter of their text: training never tells one that evaluation asks for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from data.draws import Draws
from data.errors import DataError
from data.tokenizer import Tokenizer

HELDOUT = 8  # of so many facts one is held out
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
        words = sorted({word[1:] for word in found if re.fullmatch(" [a-z]{3,}", word)})
        self.words = words if len(words) >= _ENOUGH else sorted({*words, *_LETTERS})
        self._tokenizer = tokenizer
        self._ids: dict[str, tuple[int, ...]] = {}
        self._end = self._encode("\n")

    def draw(self, draws: Draws, count: int, *, heldout: bool) -> list[Fact]:
        """`count` facts of different keys, or nearly as many if words are few. Raises DataError for more than there are words."""
        if count > len(self.words):
            raise DataError(f"data.long.facts={count}: the tokenizer has words for {len(self.words)}; give fewer facts")
        found: list[Fact] = []
        for number in draws.order(len(self.words)):
            if len(found) == count:
                break
            key = self.words[int(number)]
            for _ in range(_TRIES):
                value = self.words[draws.below(len(self.words))]
                if is_heldout(key, value) == heldout:
                    asked = self._encode("\nkey") + self._encode(f" {key}") + self._encode(" =")
                    found.append(Fact(asked, self._encode(f" {value}"), self._end))
                    break
        return found

    def _encode(self, text: str) -> tuple[int, ...]:
        if text not in self._ids:
            self._ids[text] = tuple(self._tokenizer.encode(text))
        return self._ids[text]


def is_heldout(key: str, value: str) -> bool:
    return blake2b(f"{key} = {value}".encode(), digest_size=1).digest()[0] % HELDOUT == 0


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
