"""Draws tokens from logits with random numbers that belong to a trajectory, not to a batch or a process. V vocabulary."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.fastmath import exp_
from kernels.precision import math_dtype

ODD = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio


@dataclass(frozen=True)
class Sampling:
    """temperature 0 takes the likeliest token; top_k and top_p cut the distribution (the tokens kept are drawn as they stand to
    each other). A trajectory ends with a token of `stop`, or at `max_new_tokens`. Raises ValueError for what cannot be meant.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    max_new_tokens: int = 256
    stop: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature}: must be at least 0 (0 takes the likeliest token)")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: must be at least 1, or None for the whole vocabulary")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: must lie in (0, 1]; 1 keeps the whole vocabulary")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: must be at least 1")


def stream(seed: int, key: Sequence[int]) -> int:
    """The random stream of a trajectory, 64 bits."""
    text = ",".join(map(str, (seed, *key)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def uniforms(streams: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """One number in [0, 1) for each (stream, position): SplitMix64's output function on stream + (position + 1) ODD."""
    with np.errstate(over="ignore"):
        x = np.array(streams, np.uint64) + (np.array(positions, np.uint64) + np.uint64(1)) * np.uint64(ODD)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def log_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """[n, V] -> log-probabilities of the distribution that is drawn from; at temperature 0 of the model's own (temperature 1)."""
    scaled = logits.to(math_dtype(logits))
    if sampling.temperature == 0:
        return torch.log_softmax(scaled, -1)
    if sampling.temperature != 1:
        scaled = scaled / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scaled.shape[-1]:
        floor = scaled.topk(sampling.top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < floor, -torch.inf)
    if sampling.top_p < 1:
        down, order = scaled.sort(dim=-1, descending=True, stable=True)
        p = down.softmax(-1, dtype=torch.float64)
        beyond = p.cumsum(-1) - p >= sampling.top_p  # the likelier ones reach top_p already
        scaled = scaled.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)
    return torch.log_softmax(scaled, -1)


def draw(logits: Tensor, sampling: Sampling, numbers: np.ndarray) -> tuple[list[int], list[float]]:
    """logits [n, V], one number a row for the first rows -> (their tokens, the log-probability of each as it was drawn).

    A row's draw depends on its logits and its number alone, where n is a multiple of 16.
    """
    count = len(numbers)
    logp = log_probabilities(logits, sampling)
    if sampling.temperature == 0:
        chosen = logits.argmax(-1, keepdim=True)
    else:
        below = exp_(logp.clone()).cumsum(-1, dtype=torch.float64)
        total = below[:, -1:]
        number = torch.zeros(len(logp), 1, dtype=torch.float64)
        number[:count, 0] = torch.from_numpy(numbers)
        # a number so close to 1 that the product rounds to the total would fall behind the last token
        target = torch.minimum(number.to(total.device) * total, total * (1 - 2.0**-52))
        chosen = torch.searchsorted(below, target, right=True)
    return chosen[:count, 0].tolist(), logp.gather(-1, chosen)[:count, 0].tolist()
