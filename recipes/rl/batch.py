"""Sampled trajectories as rows of tokens, with what the loss needs to know of each token.

Legend: B rows, T tokens a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.batch import Batch
from data.sft import packing


@dataclass(frozen=True, kw_only=True)
class PolicyBatch(Batch):
    """A batch whose labels were drawn by a policy. What is per token [B, T] belongs to the label at its place, and is zero where
    none is counted.
    """

    behaviour: Tensor  # [B, T] float64: log-probability of the label under the policy that drew it
    fresh: Tensor  # [B, T] bool: that policy is the one that is trained now, from the first token on
    advantage: Tensor | None = None  # [B, T] float64
    teacher: Tensor | None = None  # [B, T] float64: log-probability under the teacher, instead of advantages
    baseline: Tensor | None = None  # [B, T] float64, with a teacher: what its clipped log-ratio is compared with
    times: Tensor | None = None  # [B, T] float64: how often the label was drawn; None: once each


@dataclass
class Sampled:
    """One finished trajectory."""

    prompt: Sequence[int]
    tokens: Sequence[int]  # the sampled ones, the stop token included
    behaviour: Sequence[float]  # one for each of `tokens`
    stale: int = 0  # of `tokens` the first so many were drawn in earlier steps
    advantage: float | None = None
    teacher: Sequence[float] | None = None  # one for each of `tokens`
    baseline: Sequence[float] | None = None  # with a teacher: one for each of `tokens`
    times: int = 1  # that its group holds it: what is the same is computed once
    teacher_prompt: Sequence[int] | None = None  # what the teacher was asked

    def __len__(self) -> int:
        """Places in a row: every token but the last predicts one."""
        return len(self.prompt) + len(self.tokens) - 1


def once(group: Iterable[Sampled]) -> list[Sampled]:
    """The trajectories of a group with `times` in place of repetitions: short answers of a sure policy are often the same."""
    found: dict[tuple[Any, ...], Sampled] = {}
    for one in group:
        key = (tuple(one.tokens), tuple(one.behaviour), one.stale, one.advantage)
        if key in found:
            found[key].times += one.times
        else:
            found[key] = one
    return list(found.values())


def set_baselines(group: Sequence[Sampled], limit: float) -> None:
    """What a token's log-ratio of teacher and student, clipped to [-limit, limit], is compared with: the mean of those of the
    tokens that the group's other trajectories drew at this place after the same tokens; 0 where none came here.

    As a group's mean reward does in RL, it takes away what does not depend on the token drawn, and leaves the mean gradient.
    """
    assert all(one.teacher is not None for one in group), "baselines are of teachers' judgements"
    ratios = [[max(-limit, min(limit, t - b)) for t, b in zip(one.teacher or (), one.behaviour)] for one in group]
    for i, one in enumerate(group):
        alike, found = list(range(len(group))), list[float]()
        for at, token in enumerate(one.tokens):
            alike = [j for j in alike if at < len(group[j].tokens)]
            times = {j: group[j].times - (j == i) for j in alike}
            count = sum(times.values())
            found.append(sum(ratios[j][at] * times[j] for j in alike) / count if count else 0.0)
            alike = [j for j in alike if group[j].tokens[at] == token]
        one.baseline = found


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Numbers of items for each row, best-fit as in fine-tuning. Raises ValueError for an item longer than a row."""
    if lengths and (size := max(lengths)) > capacity:
        raise ValueError(f"a sequence of {size} tokens does not fit a row of {capacity}")
    return packing.pack(np.array(lengths, dtype=np.int64), capacity)


def collate(rows: Sequence[Sequence[Sampled]], length: int, fill: int) -> PolicyBatch:
    """Rows of `length` tokens, each holding its trajectories one after another; the rest is padding of token `fill`."""
    shape = (len(rows), length)
    tokens, labels = np.full(shape, fill, np.int64), np.full(shape, fill, np.int64)
    starts, counted, filled, fresh = (np.zeros(shape, bool) for _ in range(4))
    behaviour, advantage, teacher, baseline, times = (np.zeros(shape) for _ in range(5))
    starts[:, 0] = True
    every = [one for row in rows for one in row]
    taught = any(one.teacher is not None for one in every)
    for b, row in enumerate(rows):
        at = 0
        for one in row:
            whole, size = np.array([*one.prompt, *one.tokens]), len(one)
            tokens[b, at : at + size], labels[b, at : at + size] = whole[:-1], whole[1:]
            starts[b, at], filled[b, at : at + size] = True, True
            drawn = slice(at + len(one.prompt) - 1, at + size)
            counted[b, drawn], behaviour[b, drawn], times[b, drawn] = True, one.behaviour, one.times
            fresh[b, drawn] = not one.stale  # later tokens follow from states that older weights have left
            if one.teacher is not None:
                teacher[b, drawn] = one.teacher
                baseline[b, drawn] = 0.0 if one.baseline is None else one.baseline
            else:
                advantage[b, drawn] = one.advantage or 0.0
            at += size
        if at < length:
            starts[b, at] = True  # no trajectory goes on into padding
    of = torch.from_numpy
    return PolicyBatch(
        of(tokens),
        of(labels),
        of(starts),
        of(counted)[None],
        None if filled.all() else of(~filled),
        behaviour=of(behaviour),
        fresh=of(fresh),
        advantage=None if taught else of(advantage),
        teacher=of(teacher) if taught else None,
        baseline=of(baseline) if any(one.baseline is not None for one in every) else None,
        times=of(times) if any(one.times > 1 for one in every) else None,
    )
