"""Bytes of the optimizer's state, from cards alone: what `Optimizer.state_dict` holds, but for counters and guard.*"""

from __future__ import annotations

from optim.config import OptimConfig
from optim.table import assigned
from parallel.cards import Card, Optimizer


def state_bytes(card: Card, elements: int, cfg: OptimConfig, width: int) -> int:
    """Of a rank's `elements` of a trained parameter in a model with `width` bytes a number: master, momentum or both moments."""
    own = card.dtype.width(width)
    master = 4 if own < 4 else 0
    moments = 1 if assigned(card, cfg).optimizer is Optimizer.MUON else 2
    return elements * (master + moments * max(4, own))
