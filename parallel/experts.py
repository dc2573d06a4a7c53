"""Expert dispatch as one interface: plan, dispatch, combine (design principle 9).

A balanced scheme with redundant experts can take the place of the all-to-all without the layer noticing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from parallel.world import World


@dataclass(frozen=True)
class Routed:
    """The vectors this rank's experts work on, sorted by expert."""

    tokens: Tensor  # [N, width]
    counts: Tensor  # [local experts] int64, sums to N
    probabilities: Tensor  # [N], the weight of each vector in its token's sum


class ExpertDispatch(Protocol):
    def dispatch(self, tokens: Tensor, chosen: Tensor, probabilities: Tensor) -> Routed:
        """tokens [M, width], chosen [M, k] expert numbers, probabilities [M, k]."""
        ...

    def combine(self, outputs: Tensor) -> Tensor:
        """outputs [N, width], already weighted -> [M, width], each token's sum over its experts."""
        ...


class AllToAll:
    """megatron-core's all-to-all dispatcher, any width and floating-point type, no token dropped.

    `dispatch` and `combine` of one micro-batch belong together, in that order. Without gradients and with all experts on this
    rank they only sort, to the same numbers bit for bit: in generation megatron-core's steps would cost more than the experts.
    """

    def __init__(self, config: Any, experts: int, world: World):
        from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

        ranks = world.groups.ep.size()
        self.experts = experts
        self.local_experts = experts // ranks
        self.alone = ranks == 1
        self._places: Tensor | None = None  # [M, k]: where each token's vectors lie, while it was `_sort` that dispatched
        first = world.groups.ep.rank() * self.local_experts
        self._dispatcher = MoEAlltoAllTokenDispatcher(
            self.local_experts, list(range(first, first + self.local_experts)), config=config, pg_collection=world.groups
        )

    def dispatch(self, tokens: Tensor, chosen: Tensor, probabilities: Tensor) -> Routed:
        if self.alone and not torch.is_grad_enabled():
            return self._sort(tokens, chosen, probabilities)
        m = tokens.shape[0]
        member = torch.zeros(m, self.experts, dtype=torch.bool, device=tokens.device).scatter_(1, chosen, True)
        weights = torch.zeros(m, self.experts, dtype=probabilities.dtype, device=tokens.device).scatter(1, chosen, probabilities)
        d = self._dispatcher
        sent, sent_weights = d.dispatch_preprocess(tokens, member, weights)
        got, counts, got_weights = d.dispatch_postprocess(*d.token_dispatch(sent, sent_weights))
        return Routed(got, counts.to(torch.int64), got_weights)

    def combine(self, outputs: Tensor) -> Tensor:
        if self._places is not None:
            places, self._places = self._places, None
            out = outputs.index_select(0, places[:, 0])
            for i in range(1, places.shape[1]):  # in the order of the experts, as megatron-core adds
                out += outputs.index_select(0, places[:, i])
            return out
        d = self._dispatcher
        return d.combine_postprocess(d.token_combine(d.combine_preprocess(outputs)))

    def _sort(self, tokens: Tensor, chosen: Tensor, probabilities: Tensor) -> Routed:
        chosen, order = chosen.sort(-1)
        flat = chosen.flatten()
        places = flat.argsort(stable=True)  # by expert, then by token
        self._places = torch.empty_like(places).scatter_(0, places, torch.arange(len(places), device=places.device))
        self._places = self._places.view(chosen.shape)
        counts = torch.bincount(flat, minlength=self.experts)
        weights = probabilities.gather(1, order).flatten().index_select(0, places)
        return Routed(tokens.index_select(0, places // chosen.shape[1]), counts, weights)
