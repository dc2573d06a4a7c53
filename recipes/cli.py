"""The command line: `k3 VERB key=value ...`.

A verb is one line in `VERBS` and one function that takes the words behind it; its module is imported when it is called, so
that `k3 --help` needs no torch. A user's mistake is one message and exit code 2, never a traceback.
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from recipes import processes
from recipes.config import JOBS
from recipes.errors import UserError, suggestion

USAGE = "usage: k3 VERB [key=value ...]"

# User-facing errors of the rooms below, as (module, class); compared by name so that nothing is imported to find out.
USER_ERRORS = {
    ("k3.config", "ConfigError"),
    ("data.errors", "DataError"),
    ("parallel.cards", "CardError"),
    ("parallel.config", "ParallelError"),
    ("parallel.checkpoint_folder", "CheckpointError"),
    ("k3.hf.format", "CheckpointError"),
}

# What the machine refuses and no traceback explains better.
MACHINE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES}


@dataclass(frozen=True)
class Verb:
    summary: str
    run: str  # "module:function", taking the words and returning the exit code
    trains: bool = False  # needs the environment of recipes/launch.py
    sections: tuple[str, ...] | None = ()  # of the configuration that its words may set; None: all of it
    usage: str = "[key=value ...]"


BENCHES = {
    "kda": "kernels.kda.bench:main",
    "experts": "recipes.bench_experts:run",
    "step": "recipes.bench_step:run",
    "traffic": "recipes.bench_traffic:run",
    "pipeline": "recipes.bench_pipeline:run",
    "muon": "recipes.bench_muon:run",
    "balance": "recipes.bench_balance:run",
    "owners": "recipes.bench_owners:run",
    "offload": "recipes.bench_offload:run",
}

VERBS = {
    "pretrain": Verb("train a model from scratch on text", "recipes.cli:_pretrain", trains=True, sections=None),
    "prove": Verb(
        "show that a parallel layout computes what one process computes",
        "recipes.prove:run",
        sections=JOBS["prove"],
    ),
    "estimate": Verb(
        "print what a layout takes: parameters, FLOPs, memory of each pipeline rank, bytes sent, tokens/s; or search for one",
        "recipes.estimate:run",
        sections=JOBS["estimate"],
    ),
    "cards": Verb("print the parameters: shape, blocks, placement, optimizer", "recipes.cards:run", sections=("model",)),
    "inspect": Verb(
        "print what a run's last checkpoint, any checkpoint or a published folder holds", "recipes.inspect:run", usage="PATH"
    ),
    "import": Verb(
        "take a published folder in as a checkpoint, to train from (run.init) or to export again",
        "recipes.importing:run",
        usage="published=FOLDER out=FOLDER [dtype=bf16|fp32|fp64] [processes=N]",
    ),
    "export": Verb(
        "write a checkpoint, whatever layout it is from, as a published folder",
        "recipes.export:run",
        usage="run_or_checkpoint=PATH out=FOLDER [quantise=mxfp4|none] [passthrough=FOLDER_OR_IMPORT]",
    ),
    "bench": Verb(
        "measure this machine; without a name, everything",
        "recipes.cli:_bench",
        trains=True,
        usage="[kda|experts|step|traffic|pipeline|muon|balance|owners ...] [picture=FILE]",
    ),
    "help": Verb("print this, or the keys of a verb", "recipes.cli:_help", usage="[VERB]"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 done, 1 failed, 2 a mistake in what was typed, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    # "No CUDA runtime is found"; a filter, because torch sets the levels of its loggers when it is imported
    logging.getLogger("torch.utils.cpp_extension").addFilter(_is_error)
    try:
        return _dispatch(words, entry=argv is None)
    except KeyboardInterrupt:
        _complain("interrupted")
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has gone
        sys.stderr.close()
        return 141
    except OSError as error:
        if error.errno not in MACHINE_ERRORS:
            raise
        _complain(f"{error.filename or 'the disk'}: {error.strerror}")
        return 1
    except Exception as error:
        if not _is_users(error):
            raise
        _complain(*str(error).splitlines())
        return 2


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _complain(*lines: str) -> None:
    """To the user; of several processes the first speaks for all."""
    if processes.rank(os.environ) == 0:
        print("\n".join(f"k3: {line}" for line in lines), file=sys.stderr)


def _dispatch(words: list[str], *, entry: bool) -> int:
    if not words or words[0] in ("-h", "--help"):
        return _help([])
    name, rest = words[0], words[1:]
    if name not in VERBS:
        raise UserError(f"{name}: no such verb{suggestion(name, VERBS)}; there are {', '.join(VERBS)}")
    if any(word in ("-h", "--help") for word in rest):
        return _help([name])
    verb = VERBS[name]
    if verb.trains and entry and "--cfg" not in rest:
        from recipes import launch

        launch.ensure()
    return _load(verb.run)(rest) or 0


def _load(place: str) -> Callable[..., Any]:
    module, function = place.split(":")
    return getattr(importlib.import_module(module), function)


def _is_users(error: BaseException) -> bool:
    return any(c is UserError or (c.__module__, c.__name__) in USER_ERRORS for c in type(error).__mro__)


def _help(words: list[str]) -> int:
    if not words:
        print(f"{USAGE}\n")
        for name, verb in VERBS.items():
            print(f"  {name:<10} {verb.summary}")
        print("\n`k3 VERB --help` lists the keys of a verb; `k3 pretrain --cfg job` prints the whole configuration and stops.")
        return 0
    name = words[0]
    if name not in VERBS:
        return _dispatch([name], entry=False)  # says which verb is near
    verb = VERBS[name]
    print(f"usage: k3 {name} {verb.usage}\n\n{verb.summary}")
    if verb.sections is None or verb.sections:
        from recipes import help as table

        root = None
        if name == "prove":  # has defaults of its own
            from recipes.compose import defaults

            root = defaults(name)
        print("\n" + table.keys(verb.sections, root))
    return 0


def _pretrain(words: list[str]) -> int:
    from parallel.config import world_size
    from recipes.compose import compose, resolved_yaml
    from recipes.validate import check_devices, check_memory

    os.environ.update(processes.joined(os.environ))
    words, shows = _without_cfg(words)
    cfg = compose(words)
    if shows:
        print(resolved_yaml(cfg), end="")
        return 0
    check_memory(cfg)
    check_devices(cfg)
    if processes.count(os.environ) is None and (size := world_size(cfg.parallel)) > 1:
        from recipes.run_folder import check_run

        check_run(cfg)
        return processes.run(["pretrain", *words], size)
    from recipes.pretrain import pretrain

    return pretrain(cfg) or 0


def _without_cfg(words: list[str]) -> tuple[list[str], bool]:
    """The words without `--cfg job`, and whether it was there."""
    if "--cfg" not in words:
        return words, False
    at = words.index("--cfg")
    if words[at + 1 : at + 2] != ["job"]:
        raise UserError(f"--cfg {' '.join(words[at + 1 : at + 2])}: shows the configuration of the job; give --cfg job")
    return words[:at] + words[at + 2 :], True


def _bench(words: list[str]) -> int:
    names = [word for word in words if "=" not in word]
    for name in names:
        if name not in BENCHES:
            raise UserError(f"{name}: no such benchmark{suggestion(name, BENCHES)}; there are {', '.join(BENCHES)}")
    picture: dict[str, str] = {}
    for word in words:
        key, given, value = word.partition("=")
        if not given:
            continue
        if key != "picture":
            raise UserError(f"{key}: no such key of a benchmark{suggestion(key, ['picture'])}; there is picture")
        if names and "balance" not in names:
            raise UserError(f"{word}: only the balance benchmark draws one; give balance, or leave it out")
        if not value:
            raise UserError("picture= is empty; give the file to write, as in picture=balance.png")
        picture = {key: value}
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")  # options it has deprecated, and would choose
    for name in names or BENCHES:
        print(f"== {name}", flush=True)
        _load(BENCHES[name])(**(picture if name == "balance" else {}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
