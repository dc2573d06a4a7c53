"""QK-Clip: shrinks the query and key weights of heads whose attention logits grew beyond tau (report 3.3; K2's mechanism)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.clip import ClipTarget


@dataclass(frozen=True)
class Clipped:
    """heads: how many were clipped; max_logit: the largest one seen, None where no logit was; names: of edited parameters."""

    heads: int
    max_logit: float | None
    names: frozenset[str]


@torch.no_grad()
def clip_weights(targets: Sequence[ClipTarget], weights: Mapping[str, Tensor], tau: float | None) -> Clipped:
    """Edits the weights in place so that every head's largest logit S is scaled by gamma = min(1, tau / S) (tau in logits).

    The head's own query and key rows get sqrt(gamma) each; the query rows that meet the shared key get gamma, because that
    key must stay as it is for the other heads. Values are untouched. tau None only reports. Every target is reset.
    """
    if not targets:
        return Clipped(0, None, frozenset())
    # one read-back for all layers
    table = torch.stack([torch.stack(_counts(t.max_logits, tau)) for t in targets]).tolist()
    names: set[str] = set()
    for target, (count, _) in zip(targets, table):
        if count:
            assert tau is not None
            _shrink(target, weights, tau)
            names |= {target.query, target.key_value}
        target.reset()
    largest = max(row[1] for row in table)
    return Clipped(int(sum(row[0] for row in table)), None if largest == float("-inf") else largest, frozenset(names))


def _exceeds(logits: Tensor, tau: float) -> Tensor:
    return (logits > tau) & torch.isfinite(logits)  # an infinite one would set the weights to zero


def _counts(logits: Tensor, tau: float | None) -> list[Tensor]:
    count = torch.zeros_like(logits[0]) if tau is None else _exceeds(logits, tau).sum().to(logits.dtype)
    return [count.double(), logits.max().double()]


def _shrink(target: ClipTarget, weights: Mapping[str, Tensor], tau: float) -> None:
    logits = target.max_logits
    gamma = torch.where(_exceeds(logits, tau), tau / logits, 1.0)
    query = weights[target.query].view(len(gamma), target.nope + target.rope, -1)
    key_value = weights[target.key_value].view(len(gamma), target.nope + target.value, -1)
    gamma = gamma.to(query.dtype).view(-1, 1, 1)
    query[:, : target.nope].mul_(gamma.sqrt())
    query[:, target.nope :].mul_(gamma)
    key_value[:, : target.nope].mul_(gamma.sqrt())


def check_targets(targets: Sequence[ClipTarget], weights: Mapping[str, Tensor]) -> None:
    """Raises ValueError for a target that names no trained parameter or whose head sizes do not fit it."""
    for target in targets:
        _check(target, weights)


def _check(target: ClipTarget, weights: Mapping[str, Tensor]) -> None:
    heads = len(target.max_logits)
    for name, rows in ((target.query, target.nope + target.rope), (target.key_value, target.nope + target.value)):
        if name not in weights:
            raise ValueError(f"weight clip: {name} is no trained parameter; name the projection as its card does")
        if weights[name].shape[0] != heads * rows:
            shape = tuple(weights[name].shape)
            raise ValueError(f"weight clip: {name} of shape {shape} must have {heads} heads x {rows} = {heads * rows} rows")
