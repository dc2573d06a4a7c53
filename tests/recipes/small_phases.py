"""Small runs of the phases after pretraining, for tests: of a tiny pretrained model, with tasks of a few words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from data.tasks import Task
from recipes.compose import compose
from recipes.dialogue import Dialogue
from recipes.rewards.judge import Verdict
from recipes.training import train
from tests.recipes.small_run import do, write_corpus

STEPS = ("run.steps=4", "checkpoint.every=1", "checkpoint.keep_last=9", "run.eval_every=2", "run.sample_tokens=0")
TASKS = ("tasks.generators=[]", "tasks.heldout=4", "exam.max_new_tokens=4", "data.seq_length=160", "data.micro_batch_size=2")
RL = (*TASKS, "rl.prompts=4", "rl.samples=2", "rl.max_new_tokens=8", "rl.slots=8")


def make_home(home: Path) -> Path:
    """A folder with a corpus, the run `base` of two pretraining steps on it, and tasks of the domains sums and words."""
    write_corpus(home / "corpus")
    code, _ = do(home, "base", "run.steps=2", "run.sample_tokens=0")
    assert code == 0
    write_tasks(home / "tasks")
    return home


def write_tasks(folder: Path, each: int = 40) -> None:
    folder.mkdir()
    made = {
        "sums": [{"prompt": f"{n}+{n % 7}?", "answer": n + n % 7} for n in range(each)],
        "words": [{"prompt": f"say {chr(97 + n % 26)}{n}", "answer": chr(97 + n % 26)} for n in range(each)],
    }
    for name, tasks in made.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))


def words(home: Path, verb: str, run: str, *more: str) -> list[str]:
    """The command line of a small run in `home/run`, behind `k3 VERB`; the last one of a key counts."""
    where = (f"run.init={home / 'base'}", f"run.dir={home / run}", "wandb.mode=disabled")
    of_verb = {
        "extend": (
            *(f"data.corpus={home / 'corpus'}", f"data.cache={home / 'cache'}", "data.seq_length=128", "data.batch_size=4"),
            *("data.micro_batch_size=2", "data.heldout_tokens=300", "recall.rows=2"),
        ),
        "sft": (
            *(*TASKS, f"tasks.folder={home / 'tasks'}", f"data.cache={home / 'cache'}", "data.batch_size=4"),
            *("sft.examples=40", "data.heldout_tokens=60"),
        ),
        "rl": (*RL, f"tasks.folder={home / 'tasks'}"),
        "distill": (*RL, f"tasks.folder={home / 'tasks'}", f"distill.teachers=[sums:{home / 'base'},words:{home / 'base'}]"),
    }[verb]
    return list({word.partition("=")[0]: word for word in (*STEPS, *where, *of_verb, *more)}.values())


def run(home: Path, verb: str, name: str, *more: str) -> tuple[int, Path]:
    """Runs it in this process: (exit code, run folder)."""
    return train(compose(words(home, verb, name, *more), verb)), home / name


def resume(folder: Path, verb: str, *more: str) -> int:
    return train(compose([f"run.resume={folder}", "wandb.mode=disabled", *more], verb))


def by_parity(self: Dialogue, answers: Sequence[tuple[Task, Sequence[int]]]) -> list[Verdict]:
    """In the place of `Dialogue.judge`: rewards that differ though the model has learnt nothing."""
    return [Verdict(float(sum(tokens) % 2), parts={"parity": float(sum(tokens) % 2)}) for _, tokens in answers]


STOP = tuple(
    range(0, 256, 8)
)  # in the place of `Dialogue.stop`: answers of different lengths, though the model has learnt nothing


def untaught() -> None:
    """On a rank: rewards and ends for a model that has learnt nothing."""
    Dialogue.judge = by_parity  # type: ignore[method-assign]
    Dialogue.stop = property(lambda self: STOP)  # type: ignore[method-assign, assignment]
