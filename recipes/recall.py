"""Long context, measured: recall of facts told far back, and held-out loss, against the length of the row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from data.batch import Batch
from parallel.schedule import ParallelModel
from recipes.callbacks.pictures import blank
from recipes.objective import Counted, counted, evaluated

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def recall(model: ParallelModel, sets: Mapping[int, Sequence[Batch]]) -> dict[int, Counted]:
    """length -> loss and accuracy on the answers' tokens, of what `data.recall` gives. Every rank calls it with the same sets."""
    return {length: counted(model, batches) for length, batches in sets.items()}


def loss_by_length(model: ParallelModel, sets: Mapping[int, Sequence[Batch]]) -> dict[int, float]:
    """length -> held-out loss in nats of the same targets in rows of that length, of what `data.contexts` gives. Every rank calls
    it with the same sets.
    """
    return {length: counted(model, batches).loss for length, batches in sets.items()}


def loss_by_position(model: ParallelModel, batches: Sequence[Batch], edges: Sequence[int]) -> dict[tuple[int, int], float]:
    """(first, end) -> mean loss in nats of the targets at these positions of their rows, between neighbouring `edges`."""
    stretches = list(pairwise(edges))

    def measure(batch: Batch, scores: Tensor) -> Tensor:
        """[2 x stretches] float64: summed losses, then counts."""
        mask = batch.loss_mask[0]
        losses = scores[0].masked_fill(~mask, 0).sum(0, dtype=torch.float64)
        counts = mask.sum(0, dtype=torch.float64)
        return torch.stack([values[a:b].sum() for values in (losses, counts) for a, b in stretches])

    found = evaluated(model, batches, measure, 2 * len(stretches))
    sums, counts = found[: len(stretches)], found[len(stretches) :]
    return {stretch: total / max(1, count) for stretch, total, count in zip(stretches, sums, counts)}


def table(found: Mapping[str, Mapping[int, Counted]]) -> list[str]:
    """Lines of text: a row a length, and of each name ("before", "after") the loss and accuracy."""
    lengths = sorted({length for each in found.values() for length in each})
    lines = [f"{'recall at':>10}" + "".join(f"  {name + ' loss':>14} {'accuracy':>9}" for name in found)]
    for length in lengths:
        line = f"{length:>10,}"
        for each in found.values():
            one = each.get(length)
            line += f"  {one.loss:>14.3f} {one.accuracy:>9.1%}" if one else " " * 26
        lines.append(line)
    return lines


def picture(found: Mapping[str, Mapping[int, Counted]], *, trained_at: int | None = None) -> Figure:
    """Loss and accuracy on answers against the length of the row, a line for each name ("before", "after").

    trained_at: the length of the rows before, marked.
    """
    figure = blank(9.0, 3.6)
    losses, accuracy = figure.subplots(1, 2)
    for name, each in found.items():
        lengths = sorted(each)
        losses.plot(lengths, [each[n].loss for n in lengths], marker="o", label=name)
        accuracy.plot(lengths, [each[n].accuracy for n in lengths], marker="o", label=name)
    losses.set(ylabel="loss on answers (nats a token)")
    accuracy.set(ylabel="answers' tokens found", ylim=(-0.02, 1.02))
    ticks = sorted({length for each in found.values() for length in each})
    for axes in (losses, accuracy):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
        axes.set(xlabel="tokens in the row")
        if trained_at is not None:
            axes.axvline(trained_at, color="grey", linestyle=":", linewidth=1)
        axes.grid(alpha=0.3)
    losses.legend()
    return figure
