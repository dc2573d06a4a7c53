"""What each phase refuses, and what it would not read. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from data.config import SHORTEST_RECALL
from recipes.config import Config
from recipes.phases import PHASES
from recipes.rl import config as rl

TEXT = ("pretrain", "extend", "draft", "eval")  # jobs that read documents
ANSWERING = ("sft", "rl", "distill", "eval")  # those that ask for answers to tasks
SAMPLING = ("rl", "distill")  # those that learn from their own


def refusals(cfg: Config, job: str) -> Iterator[tuple[str, object, str]]:
    """(key, value, what is wrong and the fix) of the phases after pretraining."""
    if job in (*PHASES, "eval") and job != "pretrain" and cfg.run.init is None:
        yield "run.init", None, f"k3 {job} begins with a model; give its run, a checkpoint or a published folder"
    if job in ("extend", "eval"):
        if short := [length for length in cfg.recall.lengths if length < SHORTEST_RECALL]:
            yield "recall.lengths", short, f"rows must have room for facts; give {SHORTEST_RECALL} tokens or more"
        if cfg.recall.rows < 1:
            yield "recall.rows", cfg.recall.rows, "must be at least 1"
    if job in ANSWERING and cfg.exam.max_new_tokens < 1:
        yield "exam.max_new_tokens", cfg.exam.max_new_tokens, "must be at least 1"
    if job == "sft" and cfg.sft.examples < 1:
        yield "sft.examples", cfg.sft.examples, "must be at least 1"
    if job in ("rl", "distill"):
        yield from rl.refusals(cfg.rl)
        if cfg.parallel.pp > 1:
            yield (
                "parallel.pp",
                cfg.parallel.pp,
                "a pipeline does not generate yet, and this phase learns from what it generates; give 1",
            )
    if job == "draft" or (job == "prove" and cfg.phase == "draft"):
        yield from _draft(cfg)
    if job == "distill":
        try:
            if not rl.teachers(cfg.distill):
                yield "distill.teachers", [], "names no expert; give [DOMAIN:RUN,...]"
        except ValueError as error:
            yield "distill.teachers", cfg.distill.teachers, str(error)
        if not cfg.distill.limit > 0:
            yield "distill.limit", cfg.distill.limit, "must be above 0"


def _draft(cfg: Config) -> Iterator[tuple[str, object, str]]:
    if cfg.draft.steps < 1:
        yield "draft.steps", cfg.draft.steps, "must be at least 1"
    if not cfg.model.mtp_layers:
        yield "model.mtp_layers", 0, "the model has no MTP layer to make a draft of; begin with one that was pretrained with it"
    if cfg.data.seq_length < 2 + cfg.draft.steps:
        yield "data.seq_length", cfg.data.seq_length, f"must be at least 2 + draft.steps = {2 + cfg.draft.steps}"
    if cfg.parallel.pp > 1:
        yield "parallel.pp", cfg.parallel.pp, "the frozen model has no backward pass for a pipeline to run; give 1"
    if cfg.parallel.cp > 1:
        yield "parallel.cp", cfg.parallel.cp, "what the model says of later tokens lies on other context ranks; give 1"


def _not_in(*phases: str) -> Callable[[Config], bool]:
    return lambda c: c.phase not in phases


def _own_chats(c: Config) -> bool:
    return c.phase == "sft" and c.data.chat.path is not None and not c.exam.enabled


# as recipes/unused.py has them
IDLE: dict[str, tuple[Callable[[Config], bool], str]] = {
    **{
        f"data.{key}": (_not_in(*TEXT), "this phase reads no documents; k3 pretrain and k3 extend do")
        for key in ("corpus", "long")
    },
    "data.heldout_fraction": (
        lambda c: c.phase in SAMPLING or (c.phase == "sft" and c.data.chat.path is None),
        "tasks.heldout_fraction holds tasks out",
    ),
    "data.heldout_tokens": (_not_in(*TEXT, "sft"), "this phase measures answers, not a held-out loss"),
    "data.seed": (_not_in(*TEXT, "sft"), "tasks.seed decides which tasks come, and run.seed what is drawn"),
    **{
        f"data.{key}": (_not_in(*TEXT, "sft"), "rl.prompts x rl.samples trajectories are a step")
        for key in ("batch_size", "ramp")
    },
    **{f"data.chat.{key}": (_not_in("sft"), "only k3 sft reads conversations") for key in ("path", "heldout", "too_long")},
    "data.chat": (_not_in(*ANSWERING), "this phase has no conversations"),
    "tasks": (_own_chats, "the conversations are those of data.chat.path; exam.enabled=true asks tasks, too"),
    "rewards": (_own_chats, "no tasks are asked; exam.enabled=true asks some"),
    "exam.max_new_tokens": (
        lambda c: c.exam.enabled is False or (c.exam.enabled is None and _own_chats(c)),
        "no tasks are asked; give exam.enabled=true",
    ),
    "sft.examples": (lambda c: c.data.chat.path is not None, "the conversations are those of data.chat.path"),
    "rl.effort": (_not_in("rl"), "distill.teachers says what prompts state"),
    "rl.budget.end": (lambda c: c.rl.budget.start is None, "rl.budget.start=null sets no budget"),
    "rl.budget": (_not_in("rl"), "in distillation teachers judge every token, and no rewards are given"),
    "model.mtp_weight": (
        lambda c: c.phase in (*SAMPLING, "draft"),
        "this phase has a loss of its own, and the MTP layers' is no part of it",
    ),
    "optim.guard.loss": (lambda c: c.phase in SAMPLING, "the loss of this phase lies around zero, where no ratio is a spike"),
    "run.compare_dense": (_not_in("pretrain"), "only k3 pretrain compares with a dense model"),
}
