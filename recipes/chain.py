"""`chain=[pretrain,...]`: the phases of a submission, each with its own words, beginning with the weights of the one before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recipes.coming import TRAINING
from recipes.compose import compose
from recipes.config import JOBS, Config
from recipes.errors import UserError, suggestion, word


@dataclass
class Stage:
    phase: str
    cfg: Config
    words: list[str]  # that the user typed for it


def stages(words: Sequence[str], phases: Sequence[str]) -> list[Stage]:
    """The composed stages of `k3 submit WORDS`, in their order.

    A word `2:key=value` is for the second alone, and `NAME:key=value` for the one phase of that name; any other is for all.
    phases: those there are. Raises UserError.
    """
    common = [text for text in words if _split(text) is None]
    own = [(where, rest, text) for text in words if (found := _split(text)) for where, rest in [found]]
    if not own:
        first = compose(common, "submit")
        if first.chain == ["pretrain"]:
            return [Stage("pretrain", first, common)]
    names = _names([*common, *(rest for _, rest, _ in own if rest.startswith("chain="))], phases)
    # later stages have the model of the first, and each takes of the common words those that it reads
    each: list[list[str]] = [
        [w for w in common if (number == 0 or not _decides_model(w)) and _concerns(w, name, names)]
        for number, name in enumerate(names)
    ]
    for where, rest, text in own:
        if rest.split("=")[0].split(".")[0] in ("chain", "submit") or rest.startswith(("run.dir=", "run.resume=")):
            raise UserError(f"{text}: belongs to the whole chain; give it without {where}:")
        each[_number(where, names, text)].append(rest)
    if len(names) == 1:
        return [Stage(names[0], compose(each[0], "submit", phase=names[0]), each[0])]
    return _linked(names, each)


def _linked(names: Sequence[str], each: Sequence[list[str]]) -> list[Stage]:
    out: list[Stage] = []
    base = ""
    for number, (name, words) in enumerate(zip(names, each), 1):
        link = [word("run.init", out[-1].cfg.run.dir)] if out else []
        cfg = compose([*words, *link], "submit", phase=name, after=out[-1].cfg.model if out else None)
        if cfg.run.resume is not None:
            raise UserError(f"run.resume={cfg.run.resume}: a chain begins new runs; leave it out")
        base = base or str(cfg.run.dir)
        cfg.run.dir = f"{base}-{number}-{name}"
        out.append(Stage(name, cfg, words))
    return out


def _names(words: Sequence[str], phases: Sequence[str]) -> list[str]:
    """The chain that the words ask for; composed of that word alone, for the others may be wrong without their stage's."""
    names = compose([text for text in words if text.startswith("chain=")] + ["cluster=cpu"], "submit").chain
    if not names:
        raise UserError(f"chain=[]: names no phase; give some of {', '.join(phases)}")
    for name in names:
        if name not in phases:
            raise UserError(
                f"chain=[{','.join(names)}]: k3 has no phase {name}{suggestion(name, phases)}; there is {', '.join(phases)}"
            )
    return names


def _split(text: str) -> tuple[str, str] | None:
    """(stage, word) of `STAGE:key=value`; None for any other word."""
    where, colon, rest = text.partition(":")
    return (where, rest) if colon and where.isidentifier() | where.isdecimal() and "=" in rest else None


def _concerns(text: str, phase: str, names: Sequence[str]) -> bool:
    """Whether a word for all is one for `phase`: of some sections only certain phases read, and where none does, all say so."""
    section = text.lstrip("+~").split("=")[0].split(".")[0]
    readers = [name for name in names if section in JOBS[name]]
    return not readers or phase in readers


def _decides_model(text: str) -> bool:
    section, _, key = text.split("=")[0].partition(".")
    return section == "model" and key not in TRAINING


def _number(where: str, names: Sequence[str], text: str) -> int:
    """Which stage it is, from 0."""
    if where.isdecimal():
        if not 1 <= int(where) <= len(names):
            raise UserError(f"{text}: the chain has {len(names)} stage{'s' * (len(names) > 1)}, from 1")
        return int(where) - 1
    if names.count(where) != 1:
        how = "no stage" if where not in names else "more than one stage"
        raise UserError(f"{text}: {where} is {how} of chain=[{','.join(names)}]; give its number, from 1")
    return names.index(where)
