"""Exact answers on a fixed set of held-out tasks, which share no prompt with those of training: before, during and after."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.tasks import Task, survey
from k3 import Engine, Sampling, Trajectory
from parallel.together import gather
from parallel.world import World
from recipes.callbacks.pictures import blank
from recipes.config import ExamConfig
from recipes.console import say
from recipes.dialogue import Dialogue
from recipes.trainer import Callback, StepResult, Trainer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RECORD = "exams.jsonl"  # in the run folder: one exam a line
NORMAL = 1.96  # standard deviations on either side that hold 95 %


@dataclass(frozen=True)
class Grades:
    """`right[i]` is the share of the answers to task i that are right; `domains[i]` is its kind; `tokens[i]` the answers' mean
    length and `cut[i]` the share of them that reached `exam.max_new_tokens`. `guesses` holds what one answer to all tasks of a
    domain scores at best: what needs no prompt to be read.
    """

    right: tuple[float, ...]
    domains: tuple[str, ...]
    tokens: tuple[float, ...]
    cut: tuple[float, ...] = ()
    guesses: Mapping[str, float] = field(default_factory=dict)

    def of(self, domain: str | None = None) -> list[float]:
        return [r for r, d in zip(self.right, self.domains) if domain in (None, d)]

    def shares(self) -> dict[str, float]:
        """The share of right answers of each domain, and of `all`."""
        names = [None, *sorted(set(self.domains))]
        return {name or "all": sum(self.of(name)) / len(self.of(name)) for name in names}

    def guess(self, domain: str | None = None) -> str:
        """In words; none for a domain without known answers, and for all of several."""
        if domain is None and len(set(self.domains)) == 1:
            domain = self.domains[0]
        share = None if domain is None else self.guesses.get(domain)
        return "" if share is None else f", where one answer to all scores {share:.1%}"


def interval(right: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean over tasks: Wilson's, for one answer a task; of several, tasks' shares are what varies."""
    n, p, z = len(right), sum(right) / len(right), NORMAL
    if not _whole(right):
        spread = z * math.sqrt(sum((r - p) ** 2 for r in right) / max(1, n - 1) / n)
        return max(0.0, p - spread), min(1.0, p + spread)
    middle, spread = (p + z * z / (2 * n)), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (middle - spread) / (1 + z * z / n)), min(1.0, (middle + spread) / (1 + z * z / n))


def _whole(right: Sequence[float]) -> bool:
    return all(r in (0, 1) for r in right)


def gain(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float]:
    """(the gain of the mean, its 95 % interval): the same tasks twice, so that what counts is which answers changed.

    For one answer a task the interval is Bonett and Price's: as if one more task had become right and one more wrong, so that
    few tasks that all changed alike do not count as certain. For several it is that of the mean of the tasks' changes.
    """
    n = len(before)
    if not (_whole(before) and _whole(after)):
        changes = [b - a for a, b in zip(before, after)]
        mean = math.fsum(changes) / n
        spread = NORMAL * math.sqrt(math.fsum((c - mean) ** 2 for c in changes) / max(1, n - 1) / n)
        return mean, max(-1.0, mean - spread), min(1.0, mean + spread)
    better, worse = (sum(b and not a for a, b in pairs) for pairs in (list(zip(before, after)), list(zip(after, before))))
    p, q = (better + 1) / (n + 2), (worse + 1) / (n + 2)
    spread = NORMAL * math.sqrt((p + q - (p - q) ** 2) / (n + 2))
    return (better - worse) / n, max(-1.0, p - q - spread), min(1.0, p - q + spread)


class Exam:
    """The held-out tasks of a dialogue, answered once and greedily, or `samples` times as the model draws them in RL."""

    def __init__(self, dialogue: Dialogue, world: World, tasks: Sequence[Task], cfg: ExamConfig):
        self.dialogue, self.world, self.tasks, self.samples = dialogue, world, tasks, cfg.samples
        self.guesses = {one.domain: one.guessed for one in survey(tasks) if one.guess}  # tasks with tests have no answer
        temperature = 1.0 if cfg.samples else 0.0
        self.sampling = Sampling(temperature=temperature, max_new_tokens=cfg.max_new_tokens, stop=dialogue.stop)

    @property
    def how(self) -> str:
        return f"{self.samples} answers drawn to each" if self.samples else "answered greedily"

    def cut(self, grades: Grades) -> str:
        """In words; what is cut is no message, and wrong."""
        share = sum(grades.cut) / len(grades.cut)
        return f", {share:.0%} of them cut at exam.max_new_tokens={self.sampling.max_new_tokens}" if share else ""

    def grade(self, engine: Engine) -> Grades:
        """Every rank must call it; data ranks share the tasks."""
        engine.clear()
        mine = range(self.world.data_rank, len(self.tasks), self.world.data_size)
        times = max(1, self.samples)
        asked = [i for i in mine for _ in range(times)]
        prompts = {i: self.dialogue.prompt(self.tasks[i], self.dialogue.effort(i, self.tasks[i])) for i in mine}
        tried = [Trajectory(prompts[i], (i, number % times)) for number, i in enumerate(asked)]
        engine.run(tried, self.sampling, seed=0)
        groups = self.world.groups
        own: list[tuple[int, float, float, float]] = []
        if groups.tp.rank() == 0 and groups.cp.rank() == 0:
            verdicts = self.dialogue.judge([(self.tasks[i], one.tokens) for i, one in zip(asked, tried)])
            right = [next(iter(v.parts.values())) >= 1 for v in verdicts]
            for at, i in enumerate(mine):
                part = slice(at * times, (at + 1) * times)
                tokens, cut = (sum(x) / times for x in zip(*((len(t.tokens), t.finished == "length") for t in tried[part])))
                own.append((i, sum(right[part]) / times, tokens, cut))
        found = sorted(one for of_rank in gather(self.world, own) for one in of_rank)
        numbers, shares, lengths, cuts = zip(*found)
        return Grades(shares, tuple(self.tasks[i].domain for i in numbers), lengths, cuts, self.guesses)


class Exams(Callback):
    """Grades before the first step, every `every` steps and after the last, into exams.jsonl and the metrics."""

    def __init__(self, exam: Exam, engine: Engine, folder: Path, every: int):
        self.exam, self.engine, self.folder, self.every = exam, engine, folder, every
        self.written = self.exam.world.rank == 0

    def start(self, trainer: Trainer) -> None:
        step = trainer.progress.step
        if self.written:  # what a killed run has written of later steps is written again
            kept = [record for record in read(self.folder / RECORD) if record["step"] <= step]
            (self.folder / RECORD).write_text("".join(json.dumps(record) + "\n" for record in kept))
        if step == 0:
            self._grade(trainer, 0)

    def step(self, trainer: Trainer, result: StepResult) -> None:
        if result.step != trainer.steps and not (self.every and result.step % self.every == 0):
            return
        shares = self._grade(trainer, result.step).shares()
        result.metrics |= {f"exam/{name}": share for name, share in shares.items()}

    def _grade(self, trainer: Trainer, step: int) -> Grades:
        grades = self.exam.grade(self.engine)
        if self.written:
            with (self.folder / RECORD).open("a") as file:
                file.write(json.dumps({"step": step, **vars(grades)}) + "\n")
        shares = grades.shares()
        low, high = interval(grades.right)
        of = ", ".join(f"{name} {share:.1%}" for name, share in shares.items() if name != "all")
        many = f"{len(grades.right)} held-out tasks, {self.exam.how}{self.exam.cut(grades)}"
        say(f"step {step}: {shares['all']:.1%} right of {many} (95 %: {low:.1%} to {high:.1%}); {of}")
        return grades

    def close(self, trainer: Trainer) -> None:
        self.exam.dialogue.judge_of.close()

    def complete(self, trainer: Trainer) -> None:
        if not self.written:
            return
        records = read(self.folder / RECORD)
        if len(records) > 1:
            first, last = records[0], records[-1]
            trainer.results.setdefault("report", []).extend(lines(grades_of(first), grades_of(last)))
            trainer.results["exam"] = {"before": grades_of(first).shares(), "after": grades_of(last).shares()}
        picture(records).savefig(self.folder / "exam.png", dpi=120)
        trainer.results.setdefault("pictures", {})["exam"] = self.folder / "exam.png"


def read(path: Path) -> list[dict[str, Any]]:
    """The exams of a run, in order; a line that was cut off by a kill is left out."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def grades_of(record: dict[str, Any]) -> Grades:
    return Grades(
        tuple(record["right"]), tuple(record["domains"]), tuple(record["tokens"]), tuple(record["cut"]), record["guesses"]
    )


def lines(before: Grades, after: Grades) -> list[str]:
    """Before and after with 95 % intervals, by domain: of each share, and of the gain on the same tasks."""
    out = []
    for name in [None, *sorted(set(before.domains))]:
        a, b = before.of(name), after.of(name)
        mean, low, high = gain(a, b)
        says = "significant" if low > 0 or high < 0 else "not significant"
        out.append(
            f"{'answers' if name is None else '  ' + name}: {_share(a)} before, {_share(b)} after, "
            f"of {len(b)} held-out tasks{after.guess(name)}; gain {mean:+.1%} ({low:+.1%} to {high:+.1%}, {says})"
        )
    return out


def _share(right: Sequence[float]) -> str:
    low, high = interval(right)
    return f"{sum(right) / len(right):.1%} ({low:.1%} to {high:.1%})"


def picture(records: Sequence[dict[str, Any]]) -> Figure:
    """The shares of right answers over the steps, with 95 % intervals; dotted: what one answer to all tasks scores."""
    figure = blank(8, 5)
    axes = figure.add_subplot()
    steps = [record["step"] for record in records]
    every = [grades_of(record) for record in records]
    for name in [None, *sorted(set(every[0].domains))]:
        shares = [sum(g.of(name)) / len(g.of(name)) for g in every]
        (line,) = axes.plot(steps, shares, marker="o", markersize=3, linewidth=2 if name is None else 1, label=name or "all")
        if name is not None and name in every[-1].guesses:
            axes.axhline(every[-1].guesses[name], color=line.get_color(), linestyle=":", linewidth=1)
        bands = [interval(g.of(name)) for g in every]
        if name is None:
            axes.fill_between(steps, [low for low, _ in bands], [high for _, high in bands], color=line.get_color(), alpha=0.15)
    axes.set(xlabel="step", ylabel="right answers", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
