"""Samples continuations. Recomputes the whole prefix for every token: exact and simple, meant for samples during training."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


@torch.no_grad()
def generate(
    model: Callable[[Tensor], Tensor],
    tokens: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stop: int | None = None,
) -> Tensor:
    """tokens [B, T] int64, T >= 1 -> [B, T + new]. `model` gives logits [B, T, V] of tokens [B, T], or the last position's alone.

    temperature 0 takes the likeliest token; `stop` ends early once every row drew it.
    The draw depends on `seed` alone, not on the global random state. Raises ValueError for an empty prompt, a negative
    temperature or top_k below 1.
    """
    if tokens.dim() != 2 or tokens.shape[1] < 1:
        raise ValueError(f"tokens has shape {tuple(tokens.shape)}; give [rows, at least one token]")
    if temperature < 0:
        raise ValueError(f"temperature={temperature}: must be at least 0 (0 takes the likeliest token)")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k}: must be at least 1, or None for the whole vocabulary")
    generator = torch.Generator(device=tokens.device).manual_seed(seed)
    module = model if isinstance(model, nn.Module) else None
    was_training = module is not None and module.training
    if module is not None:
        module.eval()
    try:
        finished = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
        for _ in range(max_new_tokens):
            logits = model(tokens)[:, -1].float()
            if temperature == 0:
                chosen = logits.argmax(-1, keepdim=True)
            else:
                if top_k is not None and top_k < logits.shape[-1]:
                    floor = logits.topk(top_k, dim=-1).values[:, -1:]
                    logits = logits.masked_fill(logits < floor, float("-inf"))
                chosen = torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator)
            tokens = torch.cat([tokens, chosen], dim=1)
            if stop is not None:
                finished |= chosen.squeeze(1) == stop
                if bool(finished.all()):
                    break
    finally:
        if module is not None:
            module.train(was_training)
    return tokens
