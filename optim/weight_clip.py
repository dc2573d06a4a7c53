"""QK-Clip: shrinks the query and key weights of heads whose attention logits grew beyond tau (report 3.3; K2's mechanism)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.clip import ClipTarget
from parallel.shards import Shard, Shards


@dataclass(frozen=True)
class Clipped:
    """heads: how many were clipped; max_logit: the largest one seen, None where no logit was; names: of edited parameters."""

    heads: int
    max_logit: float | None
    names: frozenset[str]


@torch.no_grad()
def clip_weights(targets: Sequence[ClipTarget], weights: Mapping[str, Tensor], shards: Shards, tau: float | None) -> Clipped:
    """Edits the weights in place so that every head's largest logit S is scaled by gamma = min(1, tau / S) (tau in logits).

    The head's own query and key rows get sqrt(gamma) each; the query rows that meet the shared key get gamma, because that
    key must stay as it is for the other heads. Values are untouched. tau None only reports. Every target is reset.

    weights: this rank's parts, as `shards` says. A head's largest logit is that of all tokens, on whichever rank they are. The
    heads counted are those of the whole model, and the largest logit is theirs; `names` is what this rank's own heads changed.
    """
    names, rows = _clip_own(targets, weights, shards, tau) if targets else (set(), [])
    count, largest = sum(row[0] for row in rows), max((row[1] for row in rows), default=float("-inf"))
    if shards.pipeline_size > 1:
        own = torch.tensor([count, largest], dtype=torch.float64, device=shards.device)
        stages = shards.over_pipeline_ranks(own).tolist()
        count, largest = sum(row[0] for row in stages), max(row[1] for row in stages)
    return Clipped(int(count), None if largest == float("-inf") else largest, frozenset(names))


def _clip_own(
    targets: Sequence[ClipTarget], weights: Mapping[str, Tensor], shards: Shards, tau: float | None
) -> tuple[set[str], list[list[float]]]:
    """The names that were changed, and [heads clipped, largest logit] of every layer of this stage on every tensor rank."""
    logits = shards.max_over_data(torch.cat([t.max_logits for t in targets])).split([len(t.max_logits) for t in targets])
    # one read-back for all layers and tensor ranks
    tables = shards.over_tensor_ranks(torch.stack([torch.stack(_counts(x, tau)) for x in logits])).tolist()
    names: set[str] = set()
    for target, largest, (count, _) in zip(targets, logits, tables[shards.tensor_rank]):
        if count:
            assert tau is not None
            _shrink(target, largest, weights, shards, tau)
            names |= {target.query, target.key_value}
        target.reset()
    return names, [row for table in tables for row in table]


def _exceeds(logits: Tensor, tau: float) -> Tensor:
    return (logits > tau) & torch.isfinite(logits)  # an infinite one would set the weights to zero


def _counts(logits: Tensor, tau: float | None) -> list[Tensor]:
    count = torch.zeros_like(logits[0]) if tau is None else _exceeds(logits, tau).sum().to(logits.dtype)
    return [count.double(), logits.max().double()]


def _shrink(target: ClipTarget, logits: Tensor, weights: Mapping[str, Tensor], shards: Shards, tau: float) -> None:
    gamma = torch.where(_exceeds(logits, tau), tau / logits, 1.0)
    for name, own, shared, kept in (
        (target.query, target.nope, target.rope, 0),
        (target.key_value, target.nope, 0, target.value),
    ):
        if name in weights:  # else this rank's part is empty
            g = gamma.to(weights[name].device, weights[name].dtype).unsqueeze(1)
            by_row = torch.cat([g.sqrt().expand(-1, own), g.expand(-1, shared), torch.ones_like(g).expand(-1, kept)], 1)
            _scale_rows(weights[name], by_row.flatten(), shards[name])


def _scale_rows(part: Tensor, factors: Tensor, shard: Shard) -> None:
    """Multiplies each row of a matrix by its factor in this rank's part, elements [start, stop) of the flattened matrix."""
    cols = shard.parameter.shape[1]
    first, last = shard.start // cols, -(-shard.stop // cols)  # rows that the part touches
    by_element = factors[first:last].repeat_interleave(cols)[shard.start - first * cols :][: part.numel()]
    part.mul_(by_element.view(part.shape))


def check_targets(targets: Sequence[ClipTarget], parameters: Mapping[str, Tensor]) -> None:
    """Raises ValueError for a target that names no trained parameter or whose head sizes do not fit it."""
    for target in targets:
        _check(target, parameters)


def _check(target: ClipTarget, parameters: Mapping[str, Tensor]) -> None:
    heads = len(target.max_logits)
    for name, rows in ((target.query, target.nope + target.rope), (target.key_value, target.nope + target.value)):
        if name not in parameters:
            raise ValueError(f"weight clip: {name} is no trained parameter; name the projection as its card does")
        if parameters[name].shape[0] != heads * rows:
            shape = tuple(parameters[name].shape)
            raise ValueError(f"weight clip: {name} of shape {shape} must have {heads} heads x {rows} = {heads * rows} rows")
