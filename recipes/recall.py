"""Long context, measured: recall of facts told far back, and held-out loss, against the length of the row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from data.batch import Batch
from parallel.schedule import ParallelModel
from recipes.callbacks.pictures import blank
from recipes.objective import counted, evaluated

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Recalled:
    """Of answers that stand far back: mean loss in nats of their tokens, the share of which every token was the likeliest, and
    their number.
    """

    loss: float
    found: float
    answers: int


def recall(model: ParallelModel, sets: Mapping[int, Sequence[Batch]]) -> dict[int, Recalled]:
    """By length, of what `data.recall` gives. Every rank calls it with the same sets."""
    return {length: _recalled(model, batches) for length, batches in sets.items()}


def _recalled(model: ParallelModel, batches: Sequence[Batch]) -> Recalled:
    loss, tokens, whole, answers = evaluated(model, batches, _answers, 4)
    return Recalled(loss / max(1, tokens), whole / max(1, answers), int(answers))


def _answers(batch: Batch, scores: Tensor) -> Tensor:
    """[4] float64: the summed loss of answers' tokens and their number, then the answers of which all tokens were the likeliest,
    and all answers. An answer is a run of counted labels.
    """
    mask, (losses, hits) = batch.loss_mask[0], scores
    starts = mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    number = starts.flatten().cumsum(0)[mask.flatten()] - 1  # of each counted label's answer, over all rows
    count = int(starts.sum())
    missed = torch.zeros(count, dtype=torch.float64, device=mask.device).index_add(0, number, 1 - hits[mask].double())
    sums = (losses.masked_fill(~mask, 0).sum(dtype=torch.float64), mask.sum(), (missed == 0).sum(), count)
    return torch.stack([torch.as_tensor(x, dtype=torch.float64, device=mask.device) for x in sums])


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


def table(found: Mapping[str, Mapping[int, Recalled]]) -> list[str]:
    """Lines of text: a row a length, and of each name ("before", "after") the loss and the share found."""
    lengths = sorted({length for each in found.values() for length in each})
    lines = [f"{'recall at':>10}" + "".join(f"  {name + ' loss':>14} {'found':>9}" for name in found)]
    for length in lengths:
        line = f"{length:>10,}"
        for each in found.values():
            one = each.get(length)
            line += f"  {one.loss:>14.3f} {one.found:>9.1%}" if one else " " * 26
        lines.append(line)
    return lines


def picture(found: Mapping[str, Mapping[int, Recalled]], *, trained_at: int | None = None) -> Figure:
    """Loss on answers, and the share found, against the length of the row, a line for each name ("before", "after").

    trained_at: the length of the rows before, marked.
    """
    figure = blank(9.0, 3.6)
    losses, shares = figure.subplots(1, 2)
    for name, each in found.items():
        lengths = sorted(each)
        losses.plot(lengths, [each[n].loss for n in lengths], marker="o", label=name)
        shares.plot(lengths, [each[n].found for n in lengths], marker="o", label=name)
    losses.set(ylabel="loss on answers (nats a token)")
    shares.set(ylabel="answers found", ylim=(-0.02, 1.02))
    ticks = sorted({length for each in found.values() for length in each})
    for axes in (losses, shares):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
        axes.set(xlabel="tokens in the row")
        if trained_at is not None:
            axes.axvline(trained_at, color="grey", linestyle=":", linewidth=1)
        axes.grid(alpha=0.3)
    losses.legend()
    return figure
