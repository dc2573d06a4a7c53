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
from recipes.phases import PHASES

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
MACHINE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO}
# And what it refuses because of what was typed.
PATH_ERRORS = {errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}


@dataclass(frozen=True)
class Verb:
    summary: str
    run: str  # "module:function", taking the words and returning the exit code
    trains: bool = False  # needs the environment of recipes/launch.py
    phase: bool = False  # trains in a run folder, and is a link of `k3 submit`'s chain
    sections: tuple[str, ...] | None = ()  # of the configuration that its words may set; None: all of it
    usage: str = "[key=value ...]"
    more: str | None = None  # "module:function", giving what `--help` prints below


@dataclass(frozen=True)
class Bench:
    run: str  # "module:function", taking its keys as strings and returning an exit code or nothing
    keys: tuple[str, ...] = ()


BENCHES = {
    "kda": Bench("kernels.kda.bench:main"),
    "experts": Bench("recipes.bench.experts:run"),
    "step": Bench("recipes.bench.step:run"),
    "traffic": Bench("recipes.bench.traffic:run"),
    "pipeline": Bench("recipes.bench.pipeline:run"),
    "muon": Bench("recipes.bench.muon:run"),
    "balance": Bench("recipes.bench.balance:run", ("picture",)),
    "owners": Bench("recipes.bench.owners:run"),
    "offload": Bench("recipes.bench.offload:run"),
    "rewards": Bench("recipes.bench.rewards:run"),
    "generate": Bench("recipes.bench.generate:run"),
    "start": Bench("recipes.bench.start:run"),
    "length": Bench("recipes.bench.length:run", ("lengths",)),
    "checkpoint": Bench("recipes.bench.checkpoint:run", ("gib", "folder")),
    "faults": Bench("recipes.bench.faults:run", ("n", "precision", "seed", "start")),
}

VERBS = {
    **{name: Verb(what, f"recipes.cli:{name}", trains=True, phase=True, sections=JOBS[name]) for name, what in PHASES.items()},
    "eval": Verb(
        "measure a model: held-out loss, exact answers to tasks, recall against length",
        "recipes.cli:_eval",
        trains=True,
        sections=JOBS["eval"],
        usage="run.init=PATH [key=value ...]",
    ),
    "submit": Verb(
        "give a run, or a chain of runs, to Slurm, where it goes on until it is complete",
        "recipes.submit:run",
        sections=("nodes", "chain", "cluster", "submit"),
        usage="cluster=NAME nodes=N [any key of k3 pretrain ...] [STAGE:key=value ...]",
    ),
    "posttrain": Verb(
        "pretrain, extend, sft, rl of two experts and their distillation, one after another, and what each was worth",
        "recipes.posttrain:run",
        usage="[dir=FOLDER] [key=value ...] [STAGE:key=value ...]",
        more="recipes.posttrain:stages_in_words",
    ),
    "status": Verb(
        "list runs: how far each is, where, and what to do about one that stopped", "recipes.status:run", usage="[FOLDER]"
    ),
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
        usage="run_or_checkpoint=PATH out=FOLDER [quantise=mxfp4|none] [rule=rceil|floor] [passthrough=FOLDER_OR_IMPORT]",
    ),
    "bench": Verb(
        "measure this machine; without a name, everything",
        "recipes.cli:_bench",
        trains=True,
        usage=f"[{'|'.join(BENCHES)} ...] [key=value ...]",
    ),
    "completion": Verb(
        "print what completes commands in a shell", "recipes.completion:run", usage='bash|zsh   (eval "$(k3 completion bash)")'
    ),
    "doctor": Verb(
        "print what is installed and which kernels will run here; `doctor wandb`: where metrics will go",
        "recipes.doctor:run",
        usage="[wandb]",
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
        if error.errno not in MACHINE_ERRORS | PATH_ERRORS:
            raise
        _complain(f"{error.filename or 'the disk'}: {error.strerror}")
        return 2 if error.errno in PATH_ERRORS else 1
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
    if name != "completion":  # whose words are those of another command, as they are typed
        _refuse_repeated(rest)
    if verb.trains and entry and "--cfg" not in rest:
        from recipes import launch

        launch.ensure()
    return (_train(name, rest) if verb.phase else _load(verb.run)(rest)) or 0


def _refuse_repeated(words: Sequence[str]) -> None:
    """UserError for a key that is given twice: only one of the values could count."""
    seen: dict[str, str] = {}
    for word in words:
        key, given, _ = word.partition("=")
        if given and key in seen:
            raise UserError(f"{word}: {seen[key]} is given, too; leave one of them out")
        seen[key] = word


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
    if verb.more is not None:
        print("\n" + _load(verb.more)())
    if verb.sections is None or verb.sections:
        from recipes import help as table

        root = None
        if name in ("prove", "eval") or verb.phase:  # has defaults of its own
            from recipes.compose import defaults

            root = defaults(name)
        print("\n" + table.keys(verb.sections, root))
    return 0


def _train(phase: str, words: list[str]) -> int:
    from parallel.config import world_size
    from recipes.compose import compose, resolved_yaml
    from recipes.validate import check_devices, check_memory

    os.environ.update(processes.joined(os.environ))
    words, shows = _without_cfg(words)
    if any(word in ("-m", "--multirun") for word in words):
        return _sweep(phase, words, shows)
    cfg = compose(words, phase)
    if shows:
        print(resolved_yaml(cfg), end="")
        return 0
    check_memory(cfg)
    check_devices(cfg)
    if processes.count(os.environ) is None and (size := world_size(cfg.parallel)) > 1:
        if phase in PHASES:
            from recipes.run_folder import check_run

            check_run(cfg)
        return processes.run([phase, *words], size)
    if phase == "eval":
        from recipes.evaluate import evaluate

        return evaluate(cfg)
    from recipes.training import train

    return train(cfg) or 0


def _eval(words: list[str]) -> int:
    return _train("eval", words)


def _sweep(verb: str, words: list[str], shows: bool) -> int:
    from recipes import sweep

    if shows:
        raise UserError("--cfg job: shows one run; leave --multirun out")
    return sweep.run(verb, [word for word in words if word not in sweep.FLAGS])


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
    given = _bench_keys(names or list(BENCHES), [word for word in words if "=" in word])
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")  # options it has deprecated, and would choose
    code = 0
    for name in names or BENCHES:
        print(f"== {name}", flush=True)
        keys = {key: value for key, value in given.items() if key in BENCHES[name].keys}
        code = max(code, _load(BENCHES[name].run)(**keys) or 0)
    return code


def _bench_keys(names: list[str], words: list[str]) -> dict[str, str]:
    """What the words set, all of it keys of the chosen benchmarks."""
    of = {key: name for name, bench in BENCHES.items() for key in bench.keys}
    given: dict[str, str] = {}
    for word in words:
        key, _, value = word.partition("=")
        if key not in of:
            raise UserError(f"{key}: no such key of a benchmark{suggestion(key, of)}; there are {', '.join(of)}")
        if of[key] not in names:
            raise UserError(f"{word}: only the {of[key]} benchmark has it; give {of[key]}, or leave it out")
        if not value:
            raise UserError(f"{key}= is empty; give it a value, or leave it out")
        given[key] = value
    return given


if __name__ == "__main__":
    sys.exit(main())
