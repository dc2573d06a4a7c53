"""Carries out what `k3/activations.py` names: the one place where a part of the model is run under a saving policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from k3.activations import Save


def saving[Out](policy: Save, part: Callable[..., Out], *inputs: Any) -> Out:
    """part(*inputs), of which `policy` says what is saved for the backward pass.

    Tensors that need gradients must be among `inputs` themselves, not inside other objects: a recomputing part keeps them as
    saved tensors, where hooks find them. Without gradients nothing is saved, and nothing is computed twice.
    """
    if policy is Save.keep or not torch.is_grad_enabled():
        return part(*inputs)
    # No part draws random numbers (K3 has no dropout), so there is no generator to wind back. The repetition ends with the last
    # tensor that is saved: every rank saves equally many, so all leave out the same collectives behind it.
    return checkpoint(part, *inputs, use_reentrant=False, preserve_rng_state=False)
