"""Operators with hand-written gradients, without their cost where no gradient is wanted.

Entering an autograd function takes longer than a small operator itself; in generation every operator is small.
"""

from __future__ import annotations

from typing import Any

import torch


class _Forgetful:
    """What a forward pass writes to when no backward pass will come."""

    def save_for_backward(self, *tensors: Any) -> None:
        pass

    def mark_non_differentiable(self, *tensors: Any) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


def call(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """function.apply(*arguments), or its forward alone while gradients are off."""
    return function.apply(*arguments) if torch.is_grad_enabled() else function.forward(_Forgetful(), *arguments)
