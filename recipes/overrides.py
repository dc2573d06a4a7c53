"""Judges each `key=value` word before Hydra sees it, and puts Hydra's own errors into the user's terms."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any, NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from recipes.config import FILES, GROUPS, Config, is_group, leaves, options
from recipes.errors import UserError, first_line, shown, suggestion

OPEN = {"cluster.environment": "NAME", "tasks.parameters": "GENERATOR.PARAMETER"}  # whose names are not the schema's
SIGNS = {"+": "adds a key, and there are none beside the schema's", "~": "deletes a key, and every key is needed"}


def judge(word: str) -> Override:
    """The parsed override, or UserError in the user's terms."""
    known = dict(leaves(Config()))
    if word.startswith("-"):
        raise UserError(f"{word}: not an option; give key=value, or --help for the keys")
    key = word.lstrip("+~").split("=", 1)[0]
    owner = owner_of(key)
    inside = owner != key
    if key in OPEN and word != f"{key}={{}}" and not word.startswith(("+", "~")):
        raise UserError(f"{word}: give {key}.{OPEN[key]}=VALUE for each")
    if inside and key.count(".") != f"{owner}.{OPEN[owner]}".count("."):
        raise UserError(f"{word}: give {owner}.{OPEN[owner]}=VALUE")
    exists = key in known or is_group(key) or inside
    sign = SIGNS.get(word[:1])
    if sign:
        raise UserError(
            f"{word}: {sign}" + (f"; give {key}=value to set it" if exists else suggestion(key, [*known, *GROUPS, *FILES]))
        )
    if not exists:
        _refuse_unknown(word, key, known)
    if "=" not in word:
        raise UserError(f"{word}: has no value; give {key}=VALUE" + (f" ({_choice(key, known)})" if not inside else ""))
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException as error:
        quoted = word.split("=", 1)[1].replace('"', "")
        raise UserError(f"{word}: {first_line(error)}; quote a value with special characters: '{key}=\"{quoted}\"'") from error
    if override.is_sweep_override():
        raise UserError(f"{word}: several values; a command is one run: give --multirun for a run each")
    value = override.value()
    if any(not c.isprintable() for c in str(value)):
        raise UserError(f"{word!r}: a value cannot hold control characters, such as the end of a line")
    if is_group(key) and str(value) not in options(key):
        raise UserError(f"{word}: no such {key}{suggestion(str(value), options(key))}; there are {', '.join(options(key))}")
    if key in known and isinstance(known[key], bool) and isinstance(value, int) and value not in (0, 1):
        raise UserError(f"{word}: takes true or false, by default {shown(known[key])}")
    if inside:
        return OverridesParser.create().parse_override("++" + word)  # for Hydra adds it
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{word}: takes a finite number ({_choice(key, known)})")
    return override


def owner_of(key: str) -> str:
    """The leaf of the schema that `key` is or lies in: itself, unless it is an entry of an open mapping."""
    return next((owner for owner in OPEN if key.startswith(owner + ".")), key)


def _choice(key: str, known: dict[str, Any]) -> str:
    return f"by default {shown(known[key])}" if key in known else f"one of {', '.join(options(key))}"


def _refuse_unknown(word: str, key: str, known: dict[str, Any]) -> NoReturn:
    inside = [name for name in known if name.startswith(key + ".")]
    if inside:
        raise UserError(f"{word}: {key} is a section; give one of {', '.join(inside)}")
    if key.startswith("hydra"):
        raise UserError(f"{word}: Hydra's own keys are not read; the folder of a run is run.dir")
    names = [*known] if "." in key else [*known, *GROUPS, *FILES]
    raise UserError(f"{word}: there is no key {key or '(empty)'}{suggestion(key, names) or '; k3 VERB --help lists all keys'}")


def explain(error: Exception, overrides: list[str]) -> NoReturn:
    """Hydra's error with the word that caused it, the type its key takes and the default."""
    text = first_line(error.__cause__ or error)
    word = next((o for o in reversed(overrides) if str(error).strip().endswith(o)), None)
    key = word.split("=", 1)[0] if word else getattr(error, "full_key", None)
    known = dict(leaves(Config()))
    if key in known:
        text += f"; {key} is by default {shown(known[key])}"
        if isinstance(known[key], Enum):
            text += suggestion((word or "").split("=", 1)[-1], [m.name for m in type(known[key])])
    raise UserError(f"{word or key or 'configuration'}: {text}") from error
