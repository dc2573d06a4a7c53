"""What the tokens of a row leave in the model, and the memory in which many rows keep it while they are generated.

Legend: R rows of a `Slots`, A the KDA layers, M the MLA layers, H heads and P channels on this rank, K and V head widths, W taps,
D width of a cached latent with its shared key, S places of a page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from k3.kda import KDA
from k3.mla import MLA
from k3.stage import Stage
from parallel.cards import DType

PAGE = 128


@dataclass(frozen=True)
class State:
    """What `length` tokens have left; never written to, so that rows may share it."""

    length: int
    recurrent: Tensor  # [A, H, K, V]
    inputs: Tensor  # [A, W-1, 3P]: the last ones of the convolutions of q, k and v
    latents: Tensor  # [M, length, D], where there is a draft its own last
    feature: Tensor | None = None  # [d]: what a draft reads of the last token; None: there was none

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.to_tensors().values())

    def to_tensors(self) -> dict[str, Tensor]:
        found = {"recurrent": self.recurrent, "inputs": self.inputs, "latents": self.latents}
        return found if self.feature is None else found | {"feature": self.feature}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> State:
        latents, feature = tensors["latents"], tensors.get("feature")
        return cls(latents.shape[1], tensors["recurrent"], tensors["inputs"], latents, feature)


class Shapes:
    """The layers of a stage that keep something, and what. draft: the tokens that its MTP layer proposes at a time."""

    def __init__(self, stage: Stage, draft: int = 0):
        layers: list[nn.Module] = [layer.attention for layer in stage.layers.values()]  # type: ignore[misc]
        self.kda = [m for m in layers if isinstance(m, KDA)]
        self.mla = [m for m in layers if isinstance(m, MLA)]
        if draft:
            self.mla.append(stage.mtp[0].attention)  # type: ignore[arg-type]
        self.draft, self.hidden = draft, stage.k3.hidden_size
        self.index = {m: i for same in (self.kda, self.mla) for i, m in enumerate(same)}
        c = stage.k3
        dtype = stage.embedding.weight.dtype
        self.device, self.dtype, self.math = stage.embedding.weight.device, dtype, DType.FP32.resolve(dtype)
        tensor_ranks = stage.world.groups.tp.size()
        self.heads, self.head_dim, self.taps = c.kda.heads // tensor_ranks, c.kda.head_dim, c.kda.conv_size
        self.channels = 3 * self.heads * self.head_dim
        self.latent = c.mla.kv_lora_rank + c.mla.rope_dim

    def empty(self) -> State:
        new = dict(device=self.device)
        return State(
            0,
            torch.zeros(len(self.kda), self.heads, self.head_dim, self.head_dim, dtype=self.math, **new),
            torch.zeros(len(self.kda), self.taps - 1, self.channels, dtype=self.dtype, **new),
            torch.zeros(len(self.mla), 0, self.latent, dtype=self.dtype, **new),
            torch.zeros(self.hidden, dtype=self.dtype, **new) if self.draft else None,
        )


class Slots:
    """Room for `rows` rows: per KDA layer a recurrent state and past inputs, per MLA layer pages of latents.

    What a place holds before a row fills it is zero or an earlier row's, always finite: `load` clears the pages.
    """

    def __init__(self, shapes: Shapes, rows: int):
        self.shapes, self.rows = shapes, rows
        s = shapes
        self.recurrent = [
            torch.zeros(rows, s.heads, s.head_dim, s.head_dim, dtype=s.math, device=s.device) for _ in range(len(s.kda))
        ]
        self.inputs = [torch.zeros(s.taps - 1, rows, s.channels, dtype=s.dtype, device=s.device) for _ in range(len(s.kda))]
        self.latents = self._pages(1)
        # of a draft, for the tokens that it has not followed yet, what it reads with each: of the token before
        self.features = torch.zeros(rows, s.draft + 1, s.hidden if s.draft else 0, dtype=s.dtype, device=s.device)
        self.behind = [1] * rows  # how many these are
        self.length = [0] * rows

    def _pages(self, count: int) -> list[Tensor]:
        """For each MLA layer [pages, R, S, D]."""
        s = self.shapes
        return [torch.zeros(count, self.rows, PAGE, s.latent, dtype=s.dtype, device=s.device) for _ in range(len(s.mla))]

    def reserve(self, places: int) -> None:
        """Makes room for rows of up to `places` tokens."""
        have, need = (self.latents[0].shape[0] if self.latents else places), -(-places // PAGE)
        if self.latents and need > have:
            more = self._pages(max(need, 2 * have) - have)
            self.latents = [torch.cat(pair) for pair in zip(self.latents, more)]

    def load(self, row: int, state: State) -> None:
        self.reserve(state.length)
        for i in range(len(self.recurrent)):
            self.recurrent[i][row] = state.recurrent[i]
            self.inputs[i][:, row] = state.inputs[i]
        if self.shapes.draft:  # a state from an engine without one: the draft guesses worse, and nothing else changes
            self.features[row, 0] = 0 if state.feature is None else state.feature
        self.behind[row] = 1
        for i, pages in enumerate(self.latents):
            here = pages[:, row]
            here.zero_()
            if i >= len(state.latents):
                continue
            full, rest = divmod(state.length, PAGE)
            here[:full] = state.latents[i, : full * PAGE].unflatten(0, (full, PAGE))
            if rest:
                here[full, :rest] = state.latents[i, full * PAGE :]
        self.length[row] = state.length

    def save(self, row: int, first: int = 0) -> State:
        """The row's state; its latents from token `first` on alone (then `length` counts all the same)."""
        length = self.length[row]
        s = self.shapes
        recurrent = [x[row] for x in self.recurrent]
        inputs = [x[:, row] for x in self.inputs]
        latents = [x[first // PAGE : -(-length // PAGE), row].flatten(0, 1) for x in self.latents]
        latents = [x[first % PAGE : first % PAGE + length - first] for x in latents]
        empty = s.empty()
        return State(
            length,
            torch.stack(recurrent) if recurrent else empty.recurrent,
            torch.stack(inputs) if inputs else empty.inputs,
            torch.stack(latents) if latents else torch.zeros(0, length - first, s.latent, dtype=s.dtype, device=s.device),
            self.features[row, self.behind[row] - 1].clone() if s.draft else None,
        )

    def move(self, source: int, target: int) -> None:
        for x in self.recurrent:
            x[target] = x[source]
        for x in self.inputs:
            x[:, target] = x[:, source]
        for x in self.latents:
            x[:, target] = x[:, source]
        self.features[target] = self.features[source]
        self.behind[target] = self.behind[source]
        self.length[target] = self.length[source]
