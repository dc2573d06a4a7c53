"""What each phase refuses, and what it would not read. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from data.config import SHORTEST_RECALL, ChatMode
from recipes.coming import TRAINING as TRAINED
from recipes.config import Config, Measure, Precision, recall_lengths
from recipes.errors import shown
from recipes.phases import PHASES
from recipes.rl import config as rl

TEXT = ("pretrain", "extend", "draft", "eval")  # jobs that read documents
ANSWERING = ("sft", "rl", "distill", "eval")  # those that ask for answers to tasks
SAMPLING = ("rl", "distill")  # those that learn from their own


def refusals(cfg: Config, job: str) -> Iterator[tuple[str, object, str]]:
    """(key, value, what is wrong and the fix) of the phases after pretraining."""
    if job in PHASES and cfg.phase != job:  # a resumed run's configuration has its own
        yield "run.resume", cfg.run.resume, f"is a run of k3 {cfg.phase}; continue it with that"
        return
    if job == "eval" and cfg.run.resume is not None:
        yield "run.resume", cfg.run.resume, "k3 eval continues nothing; give run.init"
    if job in (*PHASES, "eval") and job != "pretrain":
        if cfg.run.init is None:
            yield "run.init", None, f"k3 {job} begins with a model; give its run, a checkpoint or a published folder"
        elif cfg.data.tokenizer == "train":
            yield "data.tokenizer", "train", "the model reads its own tokens, and no tokenizer.json is beside it; give that file"
    if job == "eval" and (not cfg.eval.what or len(set(cfg.eval.what)) < len(cfg.eval.what)):
        yield "eval.what", cfg.eval.what, f"give each measure once, and at least one: {', '.join(Measure.__members__)}"
    if job == "eval" and cfg.eval.out is not None and Path(cfg.eval.out).is_dir():
        yield "eval.out", cfg.eval.out, "is a folder; give a file for the JSON"
    if job == "eval" and Measure.context in cfg.eval.what:
        lengths = recall_lengths(cfg)
        if uneven := [length for length in lengths if length < 1 or lengths[-1] % length]:
            why = f"eval.what=[context] cuts the same targets into rows of each, which must divide the longest, {lengths[-1]}"
            yield "recall.lengths", lengths, f"{why}; leave out {', '.join(map(str, uneven))}"
    if job == "extend" or (job == "eval" and Measure.recall in cfg.eval.what):
        if not cfg.recall.lengths and cfg.data.seq_length < SHORTEST_RECALL:
            why = f"recall is measured in such rows, and they must have room for facts; give {SHORTEST_RECALL} or recall.lengths"
            yield "data.seq_length", cfg.data.seq_length, why
        if short := [length for length in cfg.recall.lengths if length < SHORTEST_RECALL]:
            yield "recall.lengths", short, f"rows must have room for facts; give {SHORTEST_RECALL} tokens or more"
        if cfg.recall.rows < 1:
            yield "recall.rows", cfg.recall.rows, "must be at least 1"
    if job in ANSWERING and cfg.exam.max_new_tokens < 1:
        yield "exam.max_new_tokens", cfg.exam.max_new_tokens, "must be at least 1"
    if job in ANSWERING and cfg.exam.samples < 0:
        yield "exam.samples", cfg.exam.samples, "must be at least 0, which takes the likeliest answer"
    if job == "sft" and cfg.sft.examples < 1:
        yield "sft.examples", cfg.sft.examples, "must be at least 1"
    if job in SAMPLING:
        yield from rl.refusals(cfg.rl)
    if job in ANSWERING:
        yield from _generation(cfg, job)
    if job == "rl" and cfg.rl.effort is not rl.Effort.none and cfg.data.chat.mode is ChatMode.instruct:
        yield "rl.effort", cfg.rl.effort, NO_THOUGHT
    if job == "draft" or (job == "prove" and cfg.phase == "draft") or (job == "eval" and Measure.draft in cfg.eval.what):
        yield from _draft(cfg)
    if job == "distill":
        yield from _distillation(cfg)


NO_THOUGHT = "data.chat.mode=instruct answers without thinking, and has no effort to state; give data.chat.mode=thinking, or none"


def _generation(cfg: Config, job: str) -> Iterator[tuple[str, object, str]]:
    """Of jobs that generate, or do where their exams are asked for."""
    does = job in SAMPLING or (job == "eval" and Measure.tasks in cfg.eval.what) or (job == "sft" and not _no_exam(cfg))
    if cfg.parallel.pp > 1 and (job in SAMPLING or (does and (job == "eval" or cfg.exam.enabled))):
        why = "and this phase learns from what it generates" if job in SAMPLING else "and tasks are answered so"
        fix = {"sft": "give 1, or exam.enabled=false", "eval": "give 1, or eval.what without tasks"}.get(job, "give 1")
        yield "parallel.pp", cfg.parallel.pp, f"a pipeline does not generate yet, {why}; {fix}"
    if does and cfg.precision.name in (Precision.fp8, Precision.mxfp8):
        yield "precision", cfg.precision.name, f"k3 {job} generates, which low-precision products do not; give precision=bf16"


def _distillation(cfg: Config) -> Iterator[tuple[str, object, str]]:
    if not cfg.distill.limit > 0:
        yield "distill.limit", cfg.distill.limit, "must be above 0"
    try:
        experts = rl.teachers(cfg.distill)
    except ValueError as error:
        yield "distill.teachers", cfg.distill.teachers, str(error)
        return
    if not experts:
        yield "distill.teachers", [], "names no expert; give [DOMAIN:RUN,...]"
        return
    if cfg.data.chat.mode is ChatMode.instruct and any(one.effort is not rl.Effort.none for one in experts):
        yield "distill.teachers", cfg.distill.teachers, NO_THOUGHT
    taught = list(dict.fromkeys(one.domain for one in experts))
    domains = list(dict.fromkeys(cfg.tasks.generators))
    if without := [domain for domain in domains if domain not in taught]:
        yield (
            "distill.teachers",
            cfg.distill.teachers,
            f"no expert is for {', '.join(without)}, of which there are tasks; give one each, or leave those tasks out",
        )
    if cfg.tasks.folder is None and (idle := [domain for domain in taught if domain not in domains]):
        yield (
            "distill.teachers",
            cfg.distill.teachers,
            f"there are no tasks of {', '.join(idle)}; add them to tasks.generators={shown(domains)}, or leave their experts out",
        )


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
    """Conversations of the user's, and no tasks."""
    return c.phase == "sft" and c.data.chat.path is not None and not c.exam.enabled


def _no_exam(c: Config) -> bool:
    return c.exam.enabled is False or (c.exam.enabled is None and _own_chats(c))


def _measures_no(*any_of: Measure) -> Callable[[Config], bool]:
    """Whether `k3 eval` measures none of these."""
    return lambda c: c.phase == "eval" and not set(any_of) & set(c.eval.what)


UNREAD_BY_EVAL = (*("dir", "steps", "seed", "resume", "eval_every", "sample_tokens", "sample_prompt", "compare_dense"),)
KEPT = ("layer", "attention", "feed_forward", "head")


type Rule = tuple[str, tuple[Callable[[Config], bool], str]]


def _rules(keys: Iterable[str], idle: Callable[[Config], bool], why: str, prefix: str = "") -> list[Rule]:
    return [(prefix + key, (idle, why)) for key in keys]


# as recipes/unused.py has them: a key or section -> (is it without effect?, why). A key may have several.
IDLE: list[Rule] = [
    # what the phases after pretraining do not read
    *_rules(("data.corpus", "data.long"), _not_in(*TEXT), "this phase reads no documents; k3 pretrain and k3 extend do"),
    ("data.cache", (lambda c: c.phase in SAMPLING, "this phase prepares no files")),
    (
        "data.heldout_fraction",
        (
            lambda c: c.phase in SAMPLING or (c.phase == "sft" and c.data.chat.path is None),
            "tasks.heldout_fraction holds tasks out",
        ),
    ),
    ("data.heldout_tokens", (_not_in(*TEXT, "sft"), "this phase measures answers, not a held-out loss")),
    ("data.seed", (_not_in(*TEXT, "sft"), "tasks.seed decides which tasks come, and run.seed what is drawn")),
    *_rules(("batch_size", "ramp"), _not_in(*TEXT, "sft"), "rl.prompts x rl.samples trajectories are a step", "data."),
    ("data.chat", (_not_in(*ANSWERING), "this phase has no conversations")),
    *_rules(("path", "heldout", "too_long"), _not_in("sft"), "only k3 sft reads conversations", "data.chat."),
    ("data.chat.heldout", (lambda c: c.data.chat.path is None, "the conversations are made of tasks; give data.chat.path, too")),
    ("tasks", (_own_chats, "the conversations are those of data.chat.path; exam.enabled=true asks tasks, too")),
    ("tasks.heldout", (lambda c: c.phase in SAMPLING and _no_exam(c), "exam.enabled=false asks no held-out tasks")),
    ("rewards", (lambda c: c.phase == "sft" and _no_exam(c), "no tasks are asked; exam.enabled=true asks some")),
    ("exam.max_new_tokens", (lambda c: c.phase != "eval" and _no_exam(c), "no tasks are asked; give exam.enabled=true")),
    ("run.eval_every", (lambda c: c.phase in SAMPLING and _no_exam(c), "exam.enabled=false measures nothing")),
    ("sft.examples", (lambda c: c.data.chat.path is not None, "the conversations are those of data.chat.path")),
    ("rl.effort", (_not_in("rl"), "distill.teachers says what prompts state")),
    ("rl.even", (_not_in("rl"), "in distillation every token has an advantage of its own")),
    ("rl.budget.end", (lambda c: c.rl.budget.start is None, "rl.budget.start=null sets no budget")),
    ("rl.budget", (_not_in("rl"), "in distillation teachers judge every token, and no rewards are given")),
    (
        "model.mtp_weight",
        (lambda c: c.phase in (*SAMPLING, "draft"), "this phase has a loss of its own, and the MTP layers' is no part of it"),
    ),
    ("optim.guard.loss", (lambda c: c.phase in SAMPLING, "the loss of this phase lies around zero, where no ratio is a spike")),
    ("run.compare_dense", (_not_in("pretrain"), "only k3 pretrain compares with a dense model")),
    # what k3 eval does not read
    *_rules(UNREAD_BY_EVAL, lambda c: c.phase == "eval", "k3 eval trains nothing and keeps no run", "run."),
    *_rules(sorted(TRAINED), lambda c: c.phase == "eval", "k3 eval trains nothing", "model."),
    *_rules(KEPT, lambda c: c.phase == "eval", "k3 eval has no backward pass to keep anything for", "activations."),
    *_rules(("zero", "overlap", "bucket"), lambda c: c.phase == "eval", "k3 eval has no gradients", "parallel."),
    *_rules(("ramp", "long", "seed"), lambda c: c.phase == "eval", "k3 eval reads the same held-out rows always", "data."),
    ("exam.enabled", (lambda c: c.phase == "eval", "eval.what says what is measured")),
    *_rules(("tasks", "rewards", "exam", "data.chat"), _measures_no(Measure.tasks), "eval.what has no tasks"),
    ("recall.rows", (_measures_no(Measure.recall), "eval.what has no recall")),
    ("recall.lengths", (_measures_no(Measure.recall, Measure.context), "eval.what has neither recall nor context")),
    ("draft", (_measures_no(Measure.draft), "eval.what has no draft")),
    (
        "data.heldout_tokens",
        (_measures_no(Measure.heldout, Measure.context, Measure.draft), "eval.what has neither heldout, context nor draft"),
    ),
    *_rules(
        ("corpus", "cache", "heldout_fraction", "batch_size", "micro_batch_size", "seq_length"),
        _measures_no(Measure.heldout, Measure.recall, Measure.context, Measure.draft),
        "eval.what reads no text",
        "data.",
    ),
]
