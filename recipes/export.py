"""`k3 export`: a checkpoint of a run, whatever layout wrote it, as a published folder; one process, one tensor at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from k3 import hf
from recipes.console import say
from recipes.errors import UserError, suggestion
from recipes.stored import Stored, find

USAGE = "run_or_checkpoint=PATH out=FOLDER [quantise=mxfp4] [passthrough=FOLDER]"
KEYS = ("run_or_checkpoint", "out", "quantise", "passthrough")


def run(words: Sequence[str]) -> int:
    """Raises UserError for what was mistyped, k3.hf's and parallel.checkpoint's CheckpointError for what cannot be read or
    written; then nothing is left at `out`.
    """
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise UserError(f"{word}: give key=value, of {', '.join(KEYS)}")
        if key not in KEYS:
            raise UserError(f"{key}: no such key of k3 export{suggestion(key, KEYS)}; there are {', '.join(KEYS)}")
        given[key] = value
    for key in KEYS[:2]:
        if key not in given:
            raise UserError(f"{key}: not given; k3 export {USAGE}")
    path, out = Path(given["run_or_checkpoint"]), Path(given["out"])
    found = find(path)
    if found is None:
        raise UserError(f"run_or_checkpoint={path}: neither a run folder nor a checkpoint")
    stored = Stored(found)
    stored.check()
    passthrough = Path(given["passthrough"]) if "passthrough" in given else None
    hf.write_from(stored, stored.config, out, hf.Options(quantise=given.get("quantise"), passthrough=passthrough))
    say(f"{out}: step {stored.facts['step']} of {found.parent.parent}, in the published layout")
    return 0
