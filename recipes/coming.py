"""The model of a run that begins with weights is the model of those weights, which may not be there yet. Needs no torch."""

from __future__ import annotations

import copy
from pathlib import Path

from k3.config import K3Config
from recipes.config import leaves
from recipes.errors import UserError, shown

# of the model's keys those that say how it is trained, not what it is: a checkpoint does not decide them
TRAINING = {
    *("init_std", "mtp_weight", "moe.balance", "moe.bins", "moe.ema", "moe.bias_step", "moe.aux_weight"),
}


TOKENIZER = "tokenizer.json"  # in a run folder, and in a published one


def tokenizer_beside(init: Path) -> Path:
    """Where the tokenizer of the model at `init` lies: in the run folder, which may be that of a checkpoint, or the published."""
    return (init.parent.parent if init.parent.name == "checkpoints" else init) / TOKENIZER


class Coming:
    """What an earlier run, which has `model`, will have left at `path`."""

    def __init__(self, path: Path, model: K3Config):
        self.path = path
        self._model = model

    @property
    def model(self) -> K3Config:
        return copy.deepcopy(self._model)  # what is typed of it shall not change what it is compared with

    def check(self, model: K3Config) -> None:
        agree(self.path, self._model, model)


def agree(path: Path, theirs: K3Config, model: K3Config) -> None:
    """Raises UserError, with every key that differs, where the run's `model` is another than `theirs`, that of its run.init."""
    values = dict(leaves(theirs))
    wrong = [
        f"model.{key}={shown(value)}: the weights of run.init={path} have {shown(values[key])}"
        for key, value in leaves(model)
        if key not in TRAINING and value != values[key] and not (key == "draft" and value)  # which is added as it begins
    ]
    if wrong:
        raise UserError("\n".join(wrong) + "\nleave the model's keys out: run.init brings them")
