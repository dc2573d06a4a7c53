"""`k3 export`: a checkpoint of a run, whatever layout wrote it, as a published folder; one process, one tensor at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from k3 import hf
from k3.qat import Qat, Rule
from recipes.console import say, show_logs
from recipes.errors import UserError
from recipes.stored import Released, Stored, find
from recipes.words import given, one_of

USAGE = "run_or_checkpoint=PATH out=FOLDER [quantise=mxfp4|none] [rule=rceil|floor] [passthrough=FOLDER_OR_IMPORT]"
KEYS = ("run_or_checkpoint", "out", "quantise", "rule", "passthrough")


def run(words: Sequence[str]) -> int:
    """An imported checkpoint is written as it came, and one trained with qat=mxfp4 packed, with exactly the weights that it
    computed with, unless the words say otherwise.

    Raises UserError for what was mistyped, k3.hf's and parallel.checkpoint's CheckpointError for what cannot be read or written;
    then nothing is left at `out`.
    """
    values = given("export", words, KEYS, needed=2, usage=USAGE)
    show_logs()
    path, out = Path(values["run_or_checkpoint"]), Path(values["out"])
    found = find(path)
    if found is None:
        raise UserError(f"run_or_checkpoint={path}: neither a run folder nor a checkpoint")
    stored = Stored(found)
    stored.check()
    released = stored.released
    like = _passthrough(Path(values["passthrough"])) if "passthrough" in values else released
    trained = stored.qat.name is Qat.mxfp4
    packs = "mxfp4" if trained or (released is not None and released.is_packed) else "none"
    quantise = one_of("quantise", values.get("quantise", packs), {"mxfp4": "mxfp4", "none": None})
    rule = one_of("rule", values.get("rule", stored.qat.rule.value), {rule.value: rule for rule in Rule})
    if "rule" in values and quantise is None:
        raise UserError(f"rule={rule.value}: has no effect, because nothing is quantised; leave it out, or give quantise=mxfp4")
    if trained and quantise and rule is not stored.qat.rule:
        raise UserError(f"rule={rule.value}: the model was trained with qat.rule={stored.qat.rule.value}; leave it out")
    origin = None if released is None else released.origin
    hf.write_from(
        stored, stored.config, out, hf.Options(quantise=quantise, scale_rule=rule.value, passthrough=like), origin=origin
    )
    of = f"step {stored.facts['step']} of {path}" if released is None else str(found)
    say(f"{out}: {of}, in the published layout{', packed as mxfp4' if quantise else ''}")
    return 0


def _passthrough(path: Path) -> Path | Released:
    found = find(path)
    if found is None:
        return path
    imported = Stored(found)
    if imported.released is None:
        raise UserError(f"passthrough={path}: neither a published folder nor what k3 import made of one")
    imported.check()
    return imported.released
