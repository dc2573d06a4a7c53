"""Decoupled AdamW in the master's dtype, for everything that is no matrix: embeddings, head, norms, biases, convolutions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from optim.adamw_kernels import Update, kernel
from optim.config import OptimConfig
from optim.home import Home
from optim.table import Row
from parallel.shards import Shards

BATCH_ELEMENTS = 1 << 26  # of parameters updated in one go; one temporary of that size, and the gradients where they come over


class AdamW:
    """Moments of the given parameters and their update, elementwise on whatever part of them `masters` holds.

    A parameter's bias correction counts its own updates, so that one whose gradients begin late starts like a fresh one.
    Every rank must make one.
    """

    def __init__(self, cfg: OptimConfig, rows: Iterable[Row], masters: Mapping[str, Tensor], shards: Shards, home: Home):
        self.cfg, self.home = cfg.adamw, home
        self.rows = {row.name: row for row in rows if row.name in masters}
        self.exp_avg = {name: home.zeros_like(masters[name]) for name in self.rows}
        self.exp_avg_sq = {name: home.zeros_like(masters[name]) for name in self.rows}
        self.updates = {name: torch.zeros((), dtype=torch.int64) for name in self.rows}  # on the CPU: read at every step
        self.kernel = kernel(cfg, {name: masters[name] for name in self.rows}, shards)

    @torch.no_grad()
    def step(
        self, masters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], *, lr: float, decay: float, scale: float
    ) -> None:
        """Updates `masters` in place. lr: of this step; decay: the weight decay; scale: multiplies every gradient (clipping).

        Parameters without an entry in `gradients` are left as they are, moments and all.
        """
        groups: dict[tuple[int, float, bool], list[str]] = {}
        for name, row in self.rows.items():
            if name in gradients:
                self.updates[name] += 1
                groups.setdefault((int(self.updates[name]), row.lr_scale, row.decay), []).append(name)
        for (count, lr_scale, decays), names in groups.items():
            update = Update(self.cfg, count, lr * lr_scale, decay if decays else 0.0, scale)
            for batch in _batches(names, masters):
                arriving = [self.home.bring(gradients[n]) for n in batch]
                grads = [wait().to(masters[n].dtype) for n, wait in zip(batch, arriving)]
                weights, first, second = ([of[n] for n in batch] for of in (masters, self.exp_avg, self.exp_avg_sq))
                self.kernel.run(update, weights, grads, first, second)


def _batches(names: list[str], masters: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Runs of names whose tensors hold at most BATCH_ELEMENTS together (a larger tensor comes alone), each of one dtype."""
    batch: list[str] = []
    held = 0
    for name in sorted(names, key=lambda n: str(masters[n].dtype)):
        size = masters[name].numel()
        if batch and (held + size > BATCH_ELEMENTS or masters[name].dtype != masters[batch[0]].dtype):
            yield batch
            batch, held = [], 0
        batch.append(name)
        held += size
    yield batch
