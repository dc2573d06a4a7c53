"""The trained model in the published layout, for `k3.hf.load` and for other programs."""

from __future__ import annotations

import shutil
from pathlib import Path

from data.tokenizer import Tokenizer
from k3.construct import unwrap
from k3.qat import Qat
from parallel.together import from_first
from recipes.coming import TOKENIZER
from recipes.trainer import Callback, Trainer


class Export(Callback):
    """Writes `folder` when the run is complete, in place of one that an interrupted end has left. Every rank takes part.

    A model that was trained with qat=mxfp4 is written packed: exactly the weights that it computed with. The tokenizer lies
    beside the weights, so that any job may begin with the folder.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer):
        self.folder, self.tokenizer = folder, tokenizer

    def complete(self, trainer: Trainer) -> None:
        from k3 import hf  # imports megatron, whose remarks recipes.training.show_logs must silence first

        from_first(trainer.objective.world, lambda: shutil.rmtree(self.folder, ignore_errors=True))
        qat = unwrap(trainer.module).qat.name
        hf.save(trainer.module, self.folder, quantise=None if qat is Qat.none else qat.value)
        from_first(trainer.objective.world, lambda: self.tokenizer.save(self.folder / TOKENIZER))
        trainer.results["export"] = self.folder.name
