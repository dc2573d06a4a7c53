"""The one error of this room: what a user can put right about the data."""

from __future__ import annotations


class DataError(ValueError):
    """A corpus, tokenizer, cache or batch shape that cannot be used; the message names the setting, its value and the fix."""
