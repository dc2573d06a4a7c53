"""One text being generated: its prompt, what was drawn so far, and what that left in the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from k3.generation.states import State


@dataclass
class Trajectory:
    """`key` names the random stream that its tokens are drawn from, together with the seed of a run.

    logprobs: of each token under the distribution it was drawn from (at temperature 0: the model's own). finished: "stop" after
    a stop token, which is then the last of `tokens`, "length" at the limit. `state` is that of all tokens but the last one drawn,
    while the trajectory is paused; without it the engine computes it again, under the weights it then finds.
    """

    prompt: list[int]
    key: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: str | None = None
    state: State | None = None

    def to_tensors(self) -> dict[str, Any]:
        """Plain values and tensors (of this rank, where tensor ranks cut the heads), for a checkpoint."""
        out: dict[str, Any] = {
            "prompt": torch.tensor(self.prompt, dtype=torch.int64),
            "key": torch.tensor(self.key, dtype=torch.int64),
            "tokens": torch.tensor(self.tokens, dtype=torch.int64),
            "logprobs": torch.tensor(self.logprobs, dtype=torch.float64),
            "finished": self.finished or "",
        }
        return out | {f"state.{n}": t for n, t in (self.state.to_tensors() if self.state else {}).items()}

    @classmethod
    def from_tensors(cls, saved: Mapping[str, Any]) -> Trajectory:
        state = {n.removeprefix("state."): t for n, t in saved.items() if n.startswith("state.")}
        lists = {n: saved[n].tolist() for n in ("prompt", "tokens", "logprobs")}
        key, finished = tuple(saved["key"].tolist()), saved["finished"] or None
        return cls(**lists, key=key, finished=finished, state=State.from_tensors(state) if state else None)
