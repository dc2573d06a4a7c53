"""The trained model in the published layout, for `k3.hf.load` and for other programs."""

from __future__ import annotations

import shutil
from pathlib import Path

from parallel.together import from_first
from recipes.trainer import Callback, Trainer


class Export(Callback):
    """Writes `folder` when the run is complete, in place of one that an interrupted end has left. Every rank takes part."""

    def __init__(self, folder: Path):
        self.folder = folder

    def complete(self, trainer: Trainer) -> None:
        from k3 import hf  # imports megatron, whose remarks recipes.training.show_logs must silence first

        from_first(trainer.objective.world, lambda: shutil.rmtree(self.folder, ignore_errors=True))
        hf.save(trainer.module, self.folder)
        trainer.results["export"] = self.folder.name
