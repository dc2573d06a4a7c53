"""Random values for every parameter and router bias: zeros and ones hide bugs."""

from __future__ import annotations

import torch

import k3


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int = 0, scale: float = 1.0) -> torch.nn.Module:
    """Moves everything off its first value: queries, norms, A_log, dt_bias and router biases included."""
    generator = torch.Generator().manual_seed(seed)
    table = k3.cards(model)
    for name, card in table.items():
        tensor = table.tensor(name)
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        spread = {"normal": 0.0, "conv": 0.0, "dt_bias": 0.5, "ones": 0.2}.get(card.init, 0.3) * scale
        if card.role == "router bias":
            spread = 0.05 * scale
        tensor.add_((noise * spread).to(tensor.dtype))
    return model
