"""`k3 extend`: pretraining goes on with longer rows. Nothing of positions changes, for the model has nothing of positions.

Rows are of long documents, and of texts whose later parts can only be known from the earlier (data/long.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import data
from parallel.world import World
from recipes import recall
from recipes.config import Config, recall_lengths
from recipes.console import say
from recipes.phases import pretrain
from recipes.run_folder import RunFolder
from recipes.trainer import Callback, StepResult, Trainer

RECORD = "recall.jsonl"  # in the run folder


class Phase(pretrain.Phase):
    """As in pretraining; what is measured beside the held-out loss is how far back the model finds what it was told."""

    def __init__(self, cfg: Config, world: World):
        super().__init__(cfg, world)
        self.asked = data.recall(cfg.data, self.prepared, recall_lengths(cfg), rows=cfg.recall.rows)

    def measures(self, folder: RunFolder) -> list[Callback]:
        return [*super().measures(folder), Recall(self.asked, folder.path)]


class Recall(Callback):
    """Loss on answers that stand far back, and the share found, by length: before the first step and after the last."""

    def __init__(self, asked: dict[int, list[data.Batch]], folder: Path):
        self.asked, self.folder = asked, folder

    def start(self, trainer: Trainer) -> None:
        if trainer.progress.step == 0:
            self._measure(trainer, 0)

    def step(self, trainer: Trainer, result: StepResult) -> None:
        if result.step == trainer.steps:
            found = self._measure(trainer, result.step)
            result.metrics |= {f"recall/loss/{length}": one.loss for length, one in found.items()}
            result.metrics |= {f"recall/found/{length}": one.found for length, one in found.items()}

    def _measure(self, trainer: Trainer, step: int) -> dict[int, recall.Recalled]:
        found = recall.recall(trainer.model, self.asked)
        for length, one in found.items():
            say(f"step {step}: answers {length // 2:,} tokens back and more: loss {one.loss:.3f} nats, {one.found:.1%} found")
        if trainer.objective.world.rank == 0:
            kept = [record for record in _read(self.folder / RECORD) if record["step"] < step]
            kept.append({"step": step, "found": {length: vars(one) for length, one in found.items()}})
            (self.folder / RECORD).write_text("".join(json.dumps(record) + "\n" for record in kept))
        return found

    def complete(self, trainer: Trainer) -> None:
        if trainer.objective.world.rank > 0:
            return
        records = _read(self.folder / RECORD)
        names = ("before", "after")[-len(records) :]
        found = {
            name: {int(length): recall.Recalled(**one) for length, one in record["found"].items()}
            for name, record in zip(names, (records[0], records[-1])[-len(records) :])
        }
        trainer.results.setdefault("report", []).extend(recall.table(found))
        trainer.results["recall"] = {name: {n: vars(one) for n, one in each.items()} for name, each in found.items()}
        recall.picture(found).savefig(self.folder / "recall.png", dpi=120)
        trainer.results.setdefault("pictures", {})["recall"] = self.folder / "recall.png"


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
