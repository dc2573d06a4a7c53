"""The trained model in the published layout, for `k3.hf.load` and for other programs."""

from __future__ import annotations

import shutil
from pathlib import Path

from recipes.console import say
from recipes.trainer import Callback, Trainer


class Export(Callback):
    """Writes `folder` when the run is complete, in place of one that an interrupted end has left.

    Nothing is written, and a line says so, where the model is cut over tensor or expert ranks.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def complete(self, trainer: Trainer) -> None:
        from k3 import hf  # imports megatron, whose remarks recipes.pretrain.show_logs must silence first

        if (ranks := hf.cut(trainer.objective.world)) is not None:
            say(f"no {self.folder.name}/: the published layout needs whole tensors, and this model is cut over {ranks}")
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        hf.save(trainer.module, self.folder)
        trainer.results["export"] = self.folder.name
