"""The words of verbs that take a few keys and no configuration."""

from __future__ import annotations

from collections.abc import Sequence

from recipes.errors import UserError, suggestion


def given(verb: str, words: Sequence[str], keys: Sequence[str], *, needed: int, usage: str) -> dict[str, str]:
    """key -> value of `k3 VERB key=value ...`; the first `needed` keys must be there. Raises UserError for anything else."""
    out: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise UserError(f"{word}: give key=value, of {', '.join(keys)}")
        if key not in keys:
            raise UserError(f"{key}: no such key of k3 {verb}{suggestion(key, keys)}; there are {', '.join(keys)}")
        if key in out:
            raise UserError(f"{word}: {key} is given twice")
        out[key] = value
    for key in keys[:needed]:
        if key not in out:
            raise UserError(f"{key}: not given; k3 {verb} {usage}")
    return out


def one_of[T](key: str, value: str, options: dict[str, T]) -> T:
    """Raises UserError for a value that is no option."""
    if value not in options:
        raise UserError(f"{key}={value}: give one of {', '.join(options)}{suggestion(value, options)}")
    return options[value]
