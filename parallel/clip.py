"""What the weight clip needs to know about one attention layer; the layer fills it, `optim/weight_clip.py` reads it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ClipTarget:
    """One MLA layer's query and key projections (report 3.3: the weight clipping introduced in K2).

    The rows of `query` are, head by head, `nope` then `rope`; those of `key_value` are `nope` (key) then `value`.
    `max_logits` [heads of this rank] is a buffer of the layer: the largest scaled logit inside the causal mask over all
    micro-batches since the last `reset()`, -inf where nothing was seen.
    """

    query: str  # parameter name, [heads * (nope + rope), in]
    key_value: str  # parameter name, [heads * (nope + value), in]
    nope: int  # key rows per head that the head owns
    rope: int  # query rows per head that meet the key shared by all heads
    value: int  # value rows per head
    max_logits: Tensor

    def reset(self) -> None:
        self.max_logits.fill_(-torch.inf)
