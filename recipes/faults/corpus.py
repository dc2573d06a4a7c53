"""A made-up language of a few words."""

from __future__ import annotations

import random
from pathlib import Path


def write_corpus(folder: Path, seed: int = 0) -> Path:
    """60 short files; half the words follow from the word before, so there is something to learn."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(40)]
    follows = {word: rng.choice(words) for word in words}
    folder.mkdir(parents=True)
    for number in range(60):
        text, word = [], rng.choice(words)
        for _ in range(200):
            text.append(word)
            word = follows[word] if rng.random() < 0.5 else rng.choice(words)
        (folder / f"{number:02}.txt").write_text(" ".join(text) + "\n")
    return folder
