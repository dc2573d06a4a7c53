"""summary.json and summary.txt: the last thing a complete run writes, and the mark by which it is known to be complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recipes import summary
from recipes.console import say
from recipes.run_folder import read_metrics
from recipes.trainer import Callback, Trainer


class Summary(Callback):
    """`model`: its name and sizes; `layout`: the parallel sizes. Leaves the dictionary in `results["summary"]` too."""

    def __init__(self, folder: Path, model: dict[str, Any], layout: dict[str, Any]):
        self.folder = folder
        self.model = model
        self.layout = layout

    def complete(self, trainer: Trainer) -> None:
        records = list(read_metrics(self.folder / "metrics.jsonl"))
        facts = summary.summarise(records, self.model, trainer.results, trainer.progress)
        facts["loss_unit"] = trainer.objective.unit
        facts["parallel"] = {"processes": trainer.objective.world.size, **self.layout}
        trainer.results["summary"] = facts
        words = summary.text(facts, str(self.folder))
        (self.folder / "summary.txt").write_text(words + "\n")
        partial = self.folder / "summary.json.partial"
        partial.write_text(json.dumps(facts, indent=1) + "\n")
        partial.replace(self.folder / "summary.json")
        say("\n" + words)
