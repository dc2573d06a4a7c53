"""Decoupled AdamW in the master's dtype, for everything that is no matrix: embeddings, head, norms, biases, convolutions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from optim.config import AdamWConfig
from optim.table import Row

BATCH_ELEMENTS = 1 << 26  # of parameters updated in one go; one temporary of that size


class AdamW:
    """Moments of the given parameters and their update, elementwise on whatever part of them `masters` holds.

    A parameter's bias correction counts its own updates, so that one whose gradients begin late starts like a fresh one.
    """

    def __init__(self, cfg: AdamWConfig, rows: Iterable[Row], masters: Mapping[str, Tensor]):
        self.cfg = cfg
        self.rows = {row.name: row for row in rows if row.name in masters}
        self.exp_avg = {name: torch.zeros_like(masters[name]) for name in self.rows}
        self.exp_avg_sq = {name: torch.zeros_like(masters[name]) for name in self.rows}
        self.updates = {name: torch.zeros((), dtype=torch.int64) for name in self.rows}  # on the CPU: read at every step

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
            for batch in _batches(names, masters):
                self._update(batch, masters, gradients, count, lr * lr_scale, decay if decays else 0.0, scale)

    def _update(
        self,
        names: list[str],
        masters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        count: int,
        lr: float,
        decay: float,
        scale: float,
    ) -> None:
        beta1, beta2 = self.cfg.beta1, self.cfg.beta2
        weights = [masters[n] for n in names]
        grads = [gradients[n].to(masters[n].dtype) for n in names]
        first, second = [self.exp_avg[n] for n in names], [self.exp_avg_sq[n] for n in names]
        torch._foreach_mul_(first, beta1)
        torch._foreach_add_(first, grads, alpha=(1 - beta1) * scale)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, value=(1 - beta2) * scale * scale)
        denominator = torch._foreach_sqrt(second)
        torch._foreach_div_(denominator, (1 - beta2**count) ** 0.5)
        torch._foreach_add_(denominator, self.cfg.eps)
        if decay:
            torch._foreach_mul_(weights, 1 - lr * decay)
        torch._foreach_addcdiv_(weights, first, denominator, value=-lr / (1 - beta1**count))


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
