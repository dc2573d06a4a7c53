"""`k3 pretrain`: next-token prediction on text, from drawn weights or from those of `run.init`."""

from __future__ import annotations

import dataclasses
import math

import data
import k3
from data.prepare import Prepared
from parallel.together import from_first, gather
from parallel.world import World
from recipes import callbacks as cb
from recipes.assemble import DTYPES, Parts, assemble
from recipes.callbacks.dense import DenseComparison
from recipes.config import Config
from recipes.errors import UserError
from recipes.precision import low_precision
from recipes.run_folder import RunFolder
from recipes.trainer import Callback, Trainer


class Phase:
    """Reads documents laid end to end; the loss is next-token cross-entropy and the MTP layers' (recipes/objective.py)."""

    def __init__(self, cfg: Config, world: World):
        self.cfg, self.world = cfg, world
        self.prepared = prepare(cfg, world)
        self.key = self.prepared.key
        self.tokenizer = self.prepared.tokenizer()
        self.heldout = data.heldout(cfg.data, self.prepared)
        self.baselines = data.baselines(self.prepared, self.heldout)
        self.compared = math.ceil(cfg.run.steps * cfg.run.compare_dense) or None  # the step at which a dense model is, too
        self.lines: tuple[str, ...] = ()
        if (size := len(data.config.samples_of(cfg.data, cfg.run.steps - 1))) < cfg.data.batch_size:
            self.lines += (
                f"data.ramp: the run ends at {size} sequences a step, before data.batch_size={cfg.data.batch_size} is reached",
            )

    def trainer(self, parts: Parts, position: int) -> Trainer:
        of = {"rank": self.world.data_rank, "of": self.world.data_size, "horizon": parts.objective.horizon}
        stream = data.stream(self.cfg.data, self.prepared, position=position, **of)
        return Trainer(parts.model, parts.optimizer, stream, parts.objective)

    def measures(self, folder: RunFolder) -> list[Callback]:
        return [cb.Evaluation(self.heldout, self.baselines, self.cfg.run.eval_every, also=self.compared)]

    def finale(self, folder: RunFolder) -> list[Callback]:
        if not self.compared:
            return []
        return [DenseComparison(self._dense, self.heldout, folder.metrics, self.compared)]

    def _dense(self, steps: int) -> Trainer:
        """The yardstick: a trainer of the dense transformer on the same data and recipe."""
        cfg, model = self.cfg, dataclasses.replace(k3.preset("dense"), vocab_size=self.cfg.model.vocab_size)
        parts = assemble(
            model, cfg.optim, self.world, dtype=DTYPES[cfg.precision.name], seed=cfg.run.seed, steps=steps,
            activations=cfg.activations, low_precision=low_precision(cfg.precision.name),
        )  # fmt: skip
        return self.trainer(parts, 0)


def prepare(cfg: Config, world: World) -> Prepared:
    """The token files: rank 0 makes them where they are missing, the others find them, or where each machine has its own disk
    make them there.

    Raises UserError where ranks read different data.
    """
    made = prepared = from_first(world, lambda: data.prepare(cfg.data, cfg.model.vocab_size))
    found = made.key
    if world.rank > 0:
        try:
            prepared = data.prepare(cfg.data, cfg.model.vocab_size)
            found = prepared.key
        except data.DataError as error:
            found = f"none: {error}"
    for rank, key in enumerate(gather(world, found)):
        if key != made.key:
            raise UserError(
                f"data.corpus={cfg.data.corpus}: rank {rank} finds the prepared data {key}, and rank 0 {made.key}; "
                "give all machines the same files and the same version of tokenizers"
            )
    return prepared
