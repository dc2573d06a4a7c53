"""The Kimi K3 language model, made of megatron-core parts.

    world = parallel.start()
    model = k3.build(k3.preset("tiny"), world)
    logits = model(tokens)                      # [B, T] -> [B, T, V]
    cards = k3.cards(model)                     # one row a parameter

Names are resolved on first use, so that `k3.config` and `k3.presets` can be read without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k3.config import ConfigError, K3Config
    from k3.construct import balancing, build, cards, clip_targets, freeze, residual_weights
    from k3.engine import Engine
    from k3.generation.sampling import Sampling
    from k3.generation.text import generate
    from k3.generation.trajectory import Trajectory
    from k3.model import Model
    from k3.presets import preset

_HOME = {
    "build": "construct", "cards": "construct", "balancing": "construct", "clip_targets": "construct",
    "residual_weights": "construct", "freeze": "construct",
    "K3Config": "config", "ConfigError": "config", "preset": "presets", "Model": "model",
    "generate": "generation.text", "Engine": "engine", "Sampling": "generation.sampling", "Trajectory": "generation.trajectory",
}  # fmt: skip
__all__ = [
    "ConfigError", "Engine", "K3Config", "Model", "Sampling", "Trajectory", "balancing", "build", "cards", "clip_targets",
    "freeze", "generate", "preset", "residual_weights",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'k3' has no attribute {name!r}")
    return getattr(import_module(f"k3.{_HOME[name]}"), name)
