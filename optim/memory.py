"""Bytes of the optimizer's masters and moments, from cards alone."""

from __future__ import annotations

from optim.config import Offload, OptimConfig
from optim.table import assigned
from parallel.cards import Card, Optimizer


def state_bytes(card: Card, elements: int, cfg: OptimConfig, width: int) -> int:
    """Of a rank's `elements` of a trained parameter in a model with `width` bytes a number: master, momentum or both moments.

    With `cfg.offload` they lie in CPU memory, and every parameter has a master there.
    """
    own = card.dtype.width(width)
    state = max(4, own)
    master = state if own < 4 or cfg.offload is Offload.cpu else 0
    moments = 1 if assigned(card, cfg).optimizer is Optimizer.MUON else 2
    return elements * (master + moments * state)
