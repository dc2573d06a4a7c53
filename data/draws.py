"""Random numbers as a pure function of a key, the same in every version of numpy: raw 64-bit draws are all that is used."""

from __future__ import annotations

import numpy as np


class Draws:
    """The sequence of draws that belongs to `key`."""

    def __init__(self, *key: int):
        self._raw = np.random.Philox(np.random.SeedSequence(key))

    def below(self, n: int) -> int:
        """A number in 0 .. n-1."""
        return int(self._raw.random_raw()) * n >> 64

    def order(self, n: int) -> np.ndarray:
        """The numbers 0 .. n-1 in a random order."""
        return np.argsort(self._raw.random_raw(n), kind="stable")
