"""`k3 posttrain`: the whole way on one machine, verb by verb: pretrain, extend, sft, two experts by rl, and their distillation.

Each stage is a run of its own in `dir/NAME`, as `k3 VERB` makes it; one that is complete is left as it is, one that was stopped
goes on. Every stage answers the same held-out tasks, and at the end a table and a picture say what each was worth.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.console import say
from recipes.errors import UserError, suggestion, word

# tasks of different kinds whose answers are short, are not to be copied from the prompt, and come within reach in minutes
EXPERTS: dict[str, tuple[str, ...]] = {"numbers": ("gcd",), "relations": ("aiw",)}
TUNED = ("gcd", "aiw", "leg_counting")  # of what sft sees, the last has no expert
PARAMETERS: dict[str, dict[str, str]] = {  # over the preset for small models
    "aiw": {"task_types": "[siblings]", "task_type_weights": "[1.0]", "max_entities": "20"},
    "leg_counting": {"min_animals": "1", "max_animals": "1", "max_instances": "15"},
}
LAYOUT = ("parallel.dp=2",)  # of every stage: two cores do more as two ranks than as two threads
EXAM = ("exam.samples=4", "exam.max_new_tokens=20")  # the model as RL trains it: a policy that draws
HELDOUT, FRACTION = 128, 0.25  # tasks of each generator that are asked, and the share of all prompts that is held out
READING = ("run.eval_every=0", "data.heldout_tokens=16384")
TUNING = ("run.steps=280", "run.eval_every=0", "data.batch_size=8", *EXAM, "data.heldout_tokens=4096", "optim.lr=2e-3")
SAMPLING = ("run.eval_every=0", "rl.max_new_tokens=20", *EXAM, "optim.lr=2e-3")
PRACTISING, STUDYING = (*SAMPLING, "run.steps=30"), (*SAMPLING, "run.steps=100")
FOLDER = Path("runs/posttrain")
KEPT = 0.9  # of an expert's gain that its student shall have


@dataclass(frozen=True)
class Stage:
    name: str
    phase: str
    after: str | None
    words: tuple[str, ...]


def stages(folder: Path) -> list[Stage]:
    """In their order; all with the same tasks, so that what is held out of one is held out of all."""
    taught = tuple(name for names in EXPERTS.values() for name in names)
    experts = [Stage(f"rl-{kind}", "rl", "sft", (*_tasks(names), *PRACTISING, *LAYOUT)) for kind, names in EXPERTS.items()]
    teachers = ",".join(f"{name}:{folder / f'rl-{kind}'}" for kind, names in EXPERTS.items() for name in names)
    return [
        Stage("pretrain", "pretrain", None, ("run.steps=60", *READING, *LAYOUT)),
        Stage("extend", "extend", "pretrain", ("run.steps=20", *READING, *LAYOUT)),
        Stage("sft", "sft", "extend", (*_tasks(TUNED), *TUNING, *LAYOUT)),
        *experts,
        Stage("distill", "distill", "sft", (*_tasks(taught), *STUDYING, f"distill.teachers=[{teachers}]", *LAYOUT)),
    ]


def _tasks(names: Sequence[str]) -> tuple[str, ...]:
    parameters = [f"tasks.parameters.{name}.{key}={value}" for name in names for key, value in PARAMETERS.get(name, {}).items()]
    held = (f"tasks.heldout={HELDOUT * len(names)}", f"tasks.heldout_fraction={FRACTION}")
    return (f"tasks.generators=[{','.join(names)}]", *held, *parameters)


def run(words: Sequence[str]) -> int:
    """`dir=FOLDER`, and `STAGE:key=value` for one stage, `key=value` for all. Returns 0 where every stage is complete."""
    folder, own = _read(words)
    typed = {stage.name: [*own.get("", []), *own.get(stage.name, [])] for stage in stages(folder)}
    _check(folder, typed)
    began = time.perf_counter()
    for stage in stages(folder):
        if code := _train(stage, folder, typed[stage.name]):
            say(f"posttrain: {stage.name} ended with exit code {code}; the same command goes on from there")
            return code
    say(f"\nposttrain: {(time.perf_counter() - began) / 60:.1f} minutes, in {folder}")
    found = report(folder)
    (folder / "posttrain.json").write_text(json.dumps(found, indent=1) + "\n")
    say("\n".join(text(found)))
    return 0


def _read(words: Sequence[str]) -> tuple[Path, dict[str, list[str]]]:
    folder, own = FOLDER, dict[str, list[str]]()
    names = [stage.name for stage in stages(folder)]
    for text in words:
        where, colon, rest = text.partition(":")
        if text.startswith("dir="):
            folder = Path(text.removeprefix("dir="))
        elif colon and "=" in rest and "=" not in where:
            if where not in names:
                raise UserError(f"{text}: no such stage{suggestion(where, names)}; there are {', '.join(names)}")
            own.setdefault(where, []).append(rest)
        else:
            own.setdefault("", []).append(text)
    return folder, own


def stages_in_words() -> str:
    """For `--help`."""
    lines = ["stages (keys of `k3 PHASE --help`; those of STAGE:key=value replace these):"]
    for stage in stages(FOLDER):
        lines.append(f"  {stage.name:<14}k3 {stage.phase} {' '.join(stage.words)}")
    return "\n".join([f"dir={FOLDER}: where all of it lies; the same command goes on with what is not complete", "", *lines])


def _check(folder: Path, typed: Mapping[str, Sequence[str]]) -> None:
    """Raises UserError for what a stage that has not begun would refuse: before the first takes its minutes."""
    from recipes.compose import CONFIG_FILE, compose, load_resolved

    model = None
    for stage in stages(folder):
        if (file := folder / stage.name / CONFIG_FILE).is_file():
            model = model or load_resolved(file).model
            continue
        try:
            cfg = compose(_given(stage, folder, typed[stage.name]), stage.phase, after=model)
        except UserError as error:
            raise UserError("\n".join(f"{stage.name}: {line}" for line in str(error).splitlines())) from None
        model = model or cfg.model


def _given(stage: Stage, folder: Path, words: Sequence[str]) -> list[str]:
    """What `k3 PHASE` is given for a stage that begins."""
    init = [] if stage.after is None else [word("run.init", str(folder / stage.after))]
    typed = {text.split("=")[0] for text in words}
    own = (text for text in stage.words if text.split("=")[0] not in typed)
    return [*init, *own, *words, word("run.dir", str(folder / stage.name))]


def _train(stage: Stage, folder: Path, words: Sequence[str]) -> int:
    here = folder / stage.name
    if (here / "config.yaml").is_file():  # then all of it stands there
        given = (
            [word("run.resume", str(here))]
            if (here / "checkpoints").is_dir()
            else [word("run.dir", str(here)), "run.resume=auto"]
        )
    else:
        given = _given(stage, folder, words)
    say(f"\n== {stage.name}: k3 {stage.phase} {' '.join(given)}")
    return subprocess.run([sys.executable, "-P", "-m", "recipes.cli", stage.phase, *given], env=os.environ).returncode


def report(folder: Path) -> dict[str, Any]:
    """By generator: the share of held-out tasks right of each model, beside what one answer to all scores; and of what the expert
    gained what its student has.
    """
    from recipes.exam import RECORD, gain, grades_of, read

    def exam(name: str, which: int) -> Any:
        return grades_of(read(folder / name / RECORD)[which])

    base, tuned, student = exam("sft", 0), exam("sft", -1), exam("distill", -1)
    found: dict[str, Any] = {"all": {"gain_sft": gain(base.of(), tuned.of()), "base": _of(base.of()), "sft": _of(tuned.of())}}
    for kind, names in EXPERTS.items():
        expert = exam(f"rl-{kind}", -1)
        for name in names:
            each = {"base": base.of(name), "sft": tuned.of(name), "expert": expert.of(name), "student": student.of(name)}
            found[name] = {"expert": f"rl-{kind}", "tasks": len(each["sft"]), "guess": tuned.guesses[name]}
            found[name] |= {which: _of(right) for which, right in each.items()}
            found[name] |= {
                "gain_sft": gain(each["base"], each["sft"]),
                "gain_rl": gain(each["sft"], each["expert"]),
                "gain_student": gain(each["sft"], each["student"]),
            }
    together: list[list[float]] = [[], []]
    for kind, names in EXPERTS.items():
        before, after, learnt = (
            [r for name in names for r in grades.of(name)] for grades in (tuned, exam(f"rl-{kind}", -1), student)
        )
        together = [together[0] + before, together[1] + after]
        kept = (sum(learnt) - sum(before)) / (sum(after) - sum(before)) if sum(after) > sum(before) else 0.0
        found[f"rl-{kind}"] = {"gain_rl": gain(before, after), "gain_student": gain(before, learnt), "kept": kept}
    found["all"]["gain_rl"] = gain(*together)
    _picture(found, folder / "posttrain.png")
    return found


def _of(right: Sequence[float]) -> dict[str, Any]:
    from recipes.exam import interval

    return {"share": sum(right) / len(right), "interval": interval(right)}


def text(found: Mapping[str, Any]) -> list[str]:
    lines = [f"{'right answers':<22}{'base':>16}{'sft':>16}{'expert':>16}{'student':>16}{'one answer':>12}   (95 % intervals)"]
    for name, of in found.items():
        if "tasks" in of:
            shares = "".join(f"{of[w]['share']:>7.0%} ({of[w]['interval'][0]:.0%}-{of[w]['interval'][1]:.0%})".rjust(16)
                             for w in ("base", "sft", "expert", "student"))  # fmt: skip
            lines.append(f"{name:<22}{shares}{of['guess']:>12.0%}")
    mean, low, high = found["all"]["gain_sft"]
    lines.append(
        f"sft: {mean:+.1%} over all held-out tasks ({low:+.1%} to {high:+.1%}), from {found['all']['base']['share']:.1%}"
    )
    mean, low, high = found["all"]["gain_rl"]
    lines.append(f"rl: {mean:+.1%} more over the tasks of all experts ({low:+.1%} to {high:+.1%})")
    for name, of in found.items():
        if "kept" in of:
            mean, low, high = of["gain_rl"]
            side = "significant" if low > 0 else "not significant"
            lines.append(
                f"{name}: {mean:+.1%} by RL ({low:+.1%} to {high:+.1%}, {side}); its student has {of['kept']:.0%} of that "
                f"({'at least' if of['kept'] >= KEPT else 'less than'} {KEPT:.0%})"
            )
    return lines


def _picture(found: Mapping[str, Any], path: Path) -> None:
    from recipes.callbacks.pictures import blank

    names = [name for name, of in found.items() if "tasks" in of]
    figure = blank(2 + 2.2 * len(names), 4.5)
    axes = figure.add_subplot()
    for at, which in enumerate(("base", "sft", "expert", "student")):
        shares = [found[name][which]["share"] for name in names]
        ends = [found[name][which]["interval"] for name in names]
        spread = [[s - low for s, (low, _) in zip(shares, ends)], [high - s for s, (_, high) in zip(shares, ends)]]
        places = [i + 0.2 * (at - 1.5) for i in range(len(names))]
        axes.bar(places, shares, 0.18, yerr=spread, capsize=2, label=which)
    for i, name in enumerate(names):
        axes.hlines(found[name]["guess"], i - 0.45, i + 0.45, linestyles=":", label="" if i else "one answer to all")
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="held-out tasks right", ylim=(0, 1))
    axes.legend()
    figure.savefig(path, dpi=120)
