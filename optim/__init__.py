"""Per-Head Muon, AdamW, schedules, gradient and weight clipping, the parameter -> optimizer table.

`build` is resolved on first use, so that `optim.config` can be read without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optim.optimizer import Balancing, Optimizer, StepReport, build

__all__ = ["Balancing", "Optimizer", "StepReport", "build"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'optim' has no attribute {name!r}")
    from optim import optimizer

    return getattr(optimizer, name)
