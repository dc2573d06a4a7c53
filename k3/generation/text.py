"""`k3.generate`: continues rows of tokens in one call, through the engine or, where there is none, by whole passes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from k3.engine import Engine
from k3.generation.sampling import Sampling, draw, stream, uniforms
from k3.generation.trajectory import Trajectory
from k3.model import Model


@torch.no_grad()
def generate(
    model: Callable[[Tensor], Tensor],
    tokens: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    stop: int | None = None,
) -> Tensor:
    """tokens [B, T] int64, T >= 1 -> [B, T + new]; the same on all ranks where they are given the same.

    `model` is a whole `k3.Model`, or any function that gives logits [B, T, V] of tokens [B, T], or the last position's alone (the
    way through pipelines): that one computes the whole prefix for every token. temperature 0 takes the likeliest token. A row
    ends with `stop`, which then fills it up to the longest. Row i draws from the stream (seed, i), whichever way it goes.
    Raises ValueError for an empty prompt or a control that makes no sense.
    """
    if tokens.dim() != 2 or tokens.shape[1] < 1:
        raise ValueError(f"tokens has shape {tuple(tokens.shape)}; give [rows, at least one token]")
    sampling = Sampling(temperature, top_k, top_p, max_new_tokens, () if stop is None else (stop,))
    rows = [Trajectory(prompt, (i,)) for i, prompt in enumerate(tokens.tolist())]
    if isinstance(model, Model) and model.is_whole:
        Engine(model, slots=len(rows), prefix_bytes=0).run(rows, sampling, seed=seed)
    else:
        _by_whole_passes(model, rows, sampling, seed, tokens.device)
    longest = max(len(t.tokens) for t in rows)
    new = [t.tokens + [stop or 0] * (longest - len(t.tokens)) for t in rows]
    return torch.cat([tokens, torch.tensor(new, dtype=torch.int64, device=tokens.device)], 1)


def _by_whole_passes(
    model: Callable[[Tensor], Tensor], rows: list[Trajectory], sampling: Sampling, seed: int, device: torch.device
) -> None:
    training = [m for m in model.modules() if m.training] if isinstance(model, nn.Module) else []
    for module in training:
        module.training = False
    try:
        while going := [t for t in rows if t.finished is None]:
            # finished rows stay in the batch: ranks that are called together see one shape
            longest = max(len(t.tokens) for t in going)
            batch = [t.prompt + (t.tokens + [0] * longest)[:longest] for t in rows]
            out = model(torch.tensor(batch, device=device))[:, -1]
            numbers = uniforms([stream(seed, t.key) for t in rows], [longest] * len(rows))
            for t, token, logp in zip(rows, *draw(out, sampling, numbers)):
                if t.finished is None:
                    t.tokens.append(token)
                    t.logprobs.append(logp)
                    full = len(t.tokens) >= sampling.max_new_tokens
                    t.finished = "stop" if token in sampling.stop else "length" if full else None
    finally:
        for module in training:
            module.training = True
