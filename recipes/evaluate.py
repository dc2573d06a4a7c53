"""`k3 eval run.init=PATH`: what a model can do: held-out loss, exact answers to held-out tasks, recall against length."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import data
import k3
import parallel
from data.tasks import Tasks
from k3 import Engine
from parallel.schedule import ParallelModel
from parallel.world import World
from recipes import recall
from recipes.assemble import DTYPES
from recipes.config import Config, Measure, recall_lengths
from recipes.console import say
from recipes.dialogue import Dialogue
from recipes.exam import Exam, interval
from recipes.initial import initial
from recipes.objective import counted
from recipes.phases.draft import accepted, decoded, in_words
from recipes.phases.pretrain import prepare
from recipes.precision import low_precision
from recipes.rewards.judge import Judge
from recipes.tokens import tokenizer_of
from recipes.training import together


def evaluate(cfg: Config) -> int:
    """Measures and prints what `eval.what` names; into `eval.out` as JSON, too. Every rank calls it."""
    with together(cfg) as (cfg, world):
        found = measure(cfg, world)
        if cfg.eval.out is not None and world.rank == 0:
            Path(cfg.eval.out).parent.mkdir(parents=True, exist_ok=True)
            Path(cfg.eval.out).write_text(json.dumps(found, indent=1) + "\n")
    return 0


def measure(cfg: Config, world: World) -> dict[str, Any]:
    weights = initial(cfg.run.init, world)
    assert weights is not None, "validate asks for run.init"
    options = {"activations": cfg.activations, "low_precision": low_precision(cfg.precision.name), "qat": cfg.qat}
    model = k3.build(cfg.model, world, dtype=DTYPES[cfg.precision.name], draw_values=False, **options)  # type: ignore[arg-type]
    weights.weights(model)
    model.eval()
    wrapped = parallel.wrap(model, k3.cards(model), world)
    of: dict[Measure, Callable[[Config, ParallelModel], dict[str, Any]]] = {
        Measure.heldout: _heldout,
        Measure.tasks: _tasks,
        Measure.recall: _recall,
        Measure.context: _context,
        Measure.draft: _draft,
    }
    return {what.name: of[what](cfg, wrapped) for what in cfg.eval.what}


def _heldout(cfg: Config, model: ParallelModel) -> dict[str, Any]:
    prepared = prepare(cfg, model.world)
    found = counted(model, data.heldout(cfg.data, prepared))
    than = data.baselines(prepared, data.heldout(cfg.data, prepared))
    say(
        f"held-out    {found.loss:.4f} nats over {found.targets:,} tokens, {found.accuracy:.1%} of them the likeliest; "
        f"bigram {than.bigram:.4f}, unigram {than.unigram:.4f}"
    )
    return vars(found) | {"bigram": than.bigram, "unigram": than.unigram}


def _tasks(cfg: Config, model: ParallelModel) -> dict[str, Any]:
    tokenizer, _ = tokenizer_of(cfg, model.world)
    tasks = Tasks(cfg.tasks)
    with Judge(cfg.rewards, tasks.rewards()) as judge:
        dialogue = Dialogue(tasks, tokenizer, judge, cfg.data.chat.mode)
        exam = Exam(dialogue, model.world, tasks.heldout(), cfg.exam)
        grades = exam.grade(Engine(model.module))  # type: ignore[arg-type]
    found = {}
    for name, share in grades.shares().items():
        right = grades.of(None if name == "all" else name)
        low, high = interval(right)
        many = (
            f"{len(right)}, {exam.how}{exam.cut(grades) if name == 'all' else ''}{grades.guess(None if name == 'all' else name)}"
        )
        say(f"{'tasks' if name == 'all' else '  ' + name:<24}{share:.1%} right of {many} (95 %: {low:.1%} to {high:.1%})")
        found[name] = {"share": share, "low": low, "high": high, "tasks": len(right)}
    return found


def _recall(cfg: Config, model: ParallelModel) -> dict[str, Any]:
    prepared = prepare(cfg, model.world)
    found = recall.recall(model, data.recall(cfg.data, prepared, recall_lengths(cfg), rows=cfg.recall.rows))
    for line in recall.table({"": found}):
        say(line)
    return {str(length): vars(one) for length, one in found.items()}


def _context(cfg: Config, model: ParallelModel) -> dict[str, Any]:
    lengths = recall_lengths(cfg)
    sets = data.contexts(cfg.data, prepare(cfg, model.world), lengths)
    by_length = recall.loss_by_length(model, sets)
    by_place = recall.loss_by_position(model, sets[lengths[-1]], [0, *lengths])
    for length, loss in by_length.items():
        say(f"context     {loss:.4f} nats in rows of {length:,} tokens")
    for (first, end), loss in by_place.items():
        say(f"  of {lengths[-1]:,}:  {loss:.4f} nats of the tokens from {first:,} to {end:,}")
    places = {f"{first}-{end}": loss for (first, end), loss in by_place.items()}
    return {"rows": {str(length): loss for length, loss in by_length.items()}, "places": places}


def _draft(cfg: Config, model: ParallelModel) -> dict[str, Any]:
    steps = cfg.draft.steps
    batches = data.heldout(cfg.data, prepare(cfg, model.world), 1 + steps)
    found = vars(accepted(model, batches))
    if low_precision(cfg.precision.name) is None:  # generation does not honour it
        found |= decoded(Engine(model.module, draft=steps), batches, model.world)  # type: ignore[arg-type]
    say(f"draft       {in_words(found)}")
    return found
