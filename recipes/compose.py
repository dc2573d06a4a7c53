"""From `key=value` words to one typed, checked configuration, through Hydra's compose interface. Strict: nothing is dropped.

Hydra lets `+typo=1` past the schema and answers in its own terms; here every word is judged before Hydra sees it, so that
the message names the key, the value and the nearest thing that exists.
"""

from __future__ import annotations

import datetime
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from k3.config import K3Config
from parallel.config import data_parallel_size
from recipes import processes
from recipes.coming import Coming, tokenizer_beside
from recipes.config import CONF, GROUPS, JOBS, SUBMITTING, Config, is_group, leaves
from recipes.errors import UserError, first_line, suggestion
from recipes.overrides import explain, judge, owner_of
from recipes.phases import PHASES
from recipes.placement import place
from recipes.unused import without_effect
from recipes.validate import check, check_fit, check_training

if TYPE_CHECKING:
    from recipes.initial import Initial

RUNNING = (*PHASES, "eval")  # jobs that start the processes of a layout
CONFIG_FILE = "config.yaml"  # the resolved configuration inside a run folder; a job is run from this file, never recomposed


def compose(
    overrides: Sequence[str] = (), job: str = "pretrain", *, phase: str | None = None, after: K3Config | None = None
) -> Config:
    """The checked configuration of `k3 JOB overrides...`, with every default resolved (`run.dir`, `parallel.dp`).

    With `run.resume` the folder's own configuration is the base, and the overrides change it. phase: what `k3 submit` gives to
    Slurm; else it is the job, where that is one. after: the model that will be in
    `run.init` by the time of the run; None: it is there now. Raises UserError.
    """
    words, base = [judge(word) for word in overrides], []
    phase = phase or (job if job in RUNNING else _typed_phase(words))
    reads = JOBS[phase] + SUBMITTING if job == "submit" else JOBS[job]
    for word in words:
        if (section := word.key_or_group.split(".", 1)[0]) not in reads:
            of = job if phase == "pretrain" or job != "submit" else f"submit of {phase}"
            raise UserError(f"{word.input_line}: k3 {of} does not read {section}; it reads {', '.join(reads)}")
    if job == "prove" and (recipe := next((w for w in reversed(words) if w.key_or_group == "recipe"), None)):
        from recipes.shrink import shrunk  # which composes recipes

        base, words = shrunk(str(recipe.value())), [w for w in words if w.key_or_group != "recipe"]
    cfg = _from_hydra(job, [*base, *(o.input_line for o in words if o.input_line)], phase)
    folder = _resume_folder(cfg)
    if folder is not None:
        cfg = _continue(load_resolved(folder / CONFIG_FILE), cfg, words, folder)
    elif cfg.run.init is not None:
        _begin(cfg, words, after)
    if job == "submit":
        place(cfg)
    check(cfg, elsewhere=job == "submit", job=phase if job == "submit" else job)
    if job in (*RUNNING, "submit"):
        check_training(cfg)
    if job == "estimate":
        from recipes.search import settle

        settle(cfg, words)
        if not cfg.search:
            check_fit(cfg)
    if folder is None:
        _refuse_idle(cfg, words, job, base)
    _fill(cfg, job)
    return cfg


def _typed_phase(words: Sequence[Override]) -> str:
    """The phase that `phase=` names, for a job that is none itself."""
    typed = [str(word.value()) for word in words if word.key_or_group == "phase"]
    if typed and typed[-1] not in PHASES:
        raise UserError(f"phase={typed[-1]}: no such phase{suggestion(typed[-1], PHASES)}; there are {', '.join(PHASES)}")
    return typed[-1] if typed else "pretrain"


def _refuse_idle(cfg: Config, words: Sequence[Override], job: str, base: Sequence[str]) -> None:
    """UserError for typed values that differ from their defaults, or from the recipe's, and that nothing would read."""
    groups = [w.input_line for w in words if is_group(w.key_or_group) and w.input_line]
    default = _from_hydra(job, [*base, *groups], cfg.phase)
    typed = [key for w in words if not is_group(key := owner_of(w.key_or_group)) and key.split(".")[0] not in SUBMITTING]
    changed = [key for key in typed if get(cfg, key) != get(default, key)]
    if lines := without_effect(cfg, changed, job):
        raise UserError("\n".join(lines))


def defaults(job: str) -> Config:
    """What `k3 JOB` starts from, before values that depend on others are filled in."""
    return _from_hydra(job, [])


def sections(cfg: Config) -> list[str]:
    """Of the configuration what a run of its phase reads, and what its file holds."""
    return ["phase", *JOBS[cfg.phase]]


def resolved_yaml(cfg: Config) -> str:
    """The configuration of a training run."""
    return OmegaConf.to_yaml(OmegaConf.masked_copy(OmegaConf.structured(cfg), sections(cfg)), resolve=True)


def save_resolved(cfg: Config, path: str | Path) -> None:
    """Writes the whole configuration as YAML; the folder is made, and a reader never sees half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(resolved_yaml(cfg))
    partial.replace(path)


def load_resolved(path: str | Path) -> Config:
    """The configuration that `save_resolved` wrote. Raises UserError where the file is missing or is not one."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such configuration; a run folder holds one named {CONFIG_FILE}")
    try:
        return _typed(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(path)))
    except Exception as error:  # YAML and schema errors have no common base
        raise UserError(f"{path}: not a configuration of this version: {first_line(error)}") from error


def get(cfg: Config, key: str) -> Any:
    value: Any = cfg
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _set(cfg: Config, key: str, value: Any) -> None:
    *path, last = key.split(".")
    owner: Any = get(cfg, ".".join(path)) if path else cfg
    setattr(owner, last, value)


def _from_hydra(job: str, overrides: list[str], phase: str = "pretrain") -> Config:
    _store_groups()
    if job == "submit" and phase != "pretrain":  # the defaults of that phase, and a cluster
        clusters = [text for text in overrides if text.startswith("cluster=")] or ["cluster=slurm"]
        return _from_hydra(phase, [*(f"+{c}" for c in clusters), *(t for t in overrides if t not in clusters)], phase)
    GlobalHydra.instance().clear()
    # Hydra reports which file it read at every compose; the user asked for none of it
    logging.getLogger("hydra").setLevel(logging.WARNING)
    try:
        with initialize_config_dir(str(CONF), version_base=None):
            cfg = _typed(hydra_compose(job, overrides=overrides))
            cfg.phase = phase
            return cfg
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        explain(error, overrides)


def _store_groups() -> None:
    store = ConfigStore.instance()
    store.store("schema", Config)
    for group, options in GROUPS.items():
        for name, make in options.items() if group != "cluster" else ():
            store.store(name, make(), group=group)


def _typed(node: Any) -> Config:
    cfg = OmegaConf.to_object(node)
    assert isinstance(cfg, Config)
    return cfg


def _resume_folder(cfg: Config) -> Path | None:
    """The run folder to continue, or None for a fresh run."""
    if cfg.run.resume is None:
        return None
    if cfg.run.resume == "auto":
        if cfg.run.dir is None:
            raise UserError("run.resume=auto: continues what is in run.dir, so give run.dir=FOLDER too")
        folder = Path(cfg.run.dir)
        return folder if (folder / CONFIG_FILE).is_file() else None
    folder = Path(cfg.run.resume)
    if not (folder / CONFIG_FILE).is_file():
        runs = [str(p.parent) for p in Path("runs").glob(f"*/{CONFIG_FILE}")]
        raise UserError(f"run.resume={folder}: no run is there (no {CONFIG_FILE}){suggestion(str(folder), runs)}")
    if cfg.run.dir is not None and Path(cfg.run.dir).resolve() != folder.resolve():
        raise UserError(f"run.dir={cfg.run.dir}: a run continues in its own folder, run.resume={folder}; leave run.dir out")
    return folder


def _continue(base: Config, typed: Config, words: Sequence[Override], folder: Path) -> Config:
    """`base`, the configuration of the run in `folder`, with what the user typed now and nothing else.

    Whether a run may be continued with that is for recipes/run_folder.py to say, which also knows what is in the folder.
    """
    before = base.parallel.tp
    for section in SUBMITTING:  # where it runs now is no part of the run
        setattr(base, section, getattr(typed, section))
    for word in words:
        if word.key_or_group.split(".")[0] in SUBMITTING:
            continue
        if word.key_or_group == "recipe":
            raise UserError(f"{word.input_line}: a run continues with its own configuration, that of {folder}; leave it out")
        for key in _set_by(owner_of(word.key_or_group)):
            _set(base, key, get(typed, key))
    typed_sp = any(word.key_or_group == "parallel.sp" for word in words)
    if before != base.parallel.tp and 1 in (before, base.parallel.tp) and not typed_sp:
        base.parallel.sp = None  # what was filled in for the other number of tensor ranks
    base.run.dir = str(folder)
    return base


def _begin(cfg: Config, words: Sequence[Override], after: K3Config | None) -> None:
    """The model is that of `run.init`; what was typed of it must agree, but for how it is trained."""
    assert cfg.run.init is not None
    opened = _initial(Path(cfg.run.init)) if after is None else Coming(Path(cfg.run.init), after)
    if not any(word.key_or_group in ("model", "recipe") for word in words):
        value = dict(leaves(cfg))
        cfg.model = opened.model
        for word in words:
            if word.key_or_group.startswith("model."):
                _set(cfg, word.key_or_group, value[word.key_or_group])
    if cfg.phase == "draft" and not any(word.key_or_group == "model.draft" for word in words):
        cfg.model.draft = True
    opened.check(cfg.model)
    if cfg.data.tokenizer == "train" and not any(word.key_or_group == "data.tokenizer" for word in words):
        theirs = tokenizer_beside(Path(cfg.run.init))
        if after is not None or theirs.is_file():
            cfg.data.tokenizer = str(theirs)


def _initial(path: Path) -> Initial:
    from recipes.initial import Initial  # with torch

    return Initial(path)


def _set_by(key: str) -> list[str]:
    """The keys that typing `key` sets at a resume: all of the section for these groups, else what the options differ in."""
    if key not in GROUPS or key in ("model", "parallel", "activations"):
        return [key]
    options = [dict(leaves(make())) for make in GROUPS[key].values()]
    return [f"{key}.{name}" for name in options[0] if any(option[name] != options[0][name] for option in options)]


def _fill(cfg: Config, job: str) -> None:
    """Defaults that depend on other values, on the time or on the processes a launcher has started, so that the saved file says
    what really ran.
    """
    cfg.parallel.dp = data_parallel_size(cfg.parallel, processes.count(os.environ) if job in RUNNING else None)
    if cfg.parallel.sp is None:
        cfg.parallel.sp = cfg.parallel.tp > 1
    if cfg.run.dir is None and "run" in JOBS[job]:
        of = "" if cfg.phase == "pretrain" else f"{cfg.phase}-"
        base = f"runs/{of}{_preset(cfg)}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
        cfg.run.dir = base
        number = 1
        while Path(cfg.run.dir).exists():
            number += 1
            cfg.run.dir = f"{base}-{number}"


def _preset(cfg: Config) -> str:
    """The preset that the model is or was made from: the one with which most of its values agree."""
    values = dict(leaves(cfg.model))

    def agreement(name: str) -> int:
        return sum(values[key] == value for key, value in leaves(GROUPS["model"][name]()))

    return max(GROUPS["model"], key=agreement)
