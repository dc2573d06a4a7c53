"""The phases of training: each is a stream and a loss, and what is measured on the way (design principle 9).

A phase is a class `Phase(cfg, world)` in a file of its own here; recipes/training.py runs any of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from data.tokenizer import Tokenizer
    from parallel.world import World
    from recipes.assemble import Parts
    from recipes.config import Config
    from recipes.run_folder import RunFolder
    from recipes.trainer import Callback, Trainer

# verb -> what it does, for `k3 --help`; each has its defaults in recipes/conf/VERB.yaml
PHASES: Mapping[str, str] = {
    "pretrain": "train a model from scratch on text",
    "extend": "go on with longer rows: long documents and retrieval across them, nothing of positions to change",
    "sft": "fine-tune on conversations, the answers alone counted",
    "rl": "reinforce what earns rewards that a program can check",
    "distill": "teach one model on its own answers what several experts would have said",
    "draft": "make the MTP layer propose what the frozen model says, for speculative decoding",
}
# phase -> the parameters that it trains, by name; the others keep their bits. Not named: all
TRAINS: Mapping[str, Callable[[str], bool]] = {"draft": lambda name: name.startswith("mtp.")}


class Phase(Protocol):
    """Made on every rank, after the process groups and before the model: reads and prepares its data then."""

    key: str  # names what it reads: a resumed run must find the same
    tokenizer: Tokenizer
    lines: tuple[str, ...]  # what to say of it before the first step

    def trainer(self, parts: Parts, position: int) -> Trainer:
        """A trainer at step 0 whose stream stands at step `position`, without callbacks."""

    def measures(self, folder: RunFolder) -> list[Callback]:
        """Callbacks that add to the metrics of a step, before these are written down."""

    def finale(self, folder: RunFolder) -> list[Callback]:
        """Callbacks of the complete run, before pictures, export and summary."""


def open_phase(cfg: Config, world: World) -> Phase:
    """The phase `cfg.phase`, its data prepared. Collective; raises what the user can mend."""
    module = importlib.import_module(f"recipes.phases.{cfg.phase}")
    return module.Phase(cfg, world)
