"""Speculative decoding: the MTP layer proposes tokens, one pass of the model over all of them says which it would have drawn.

The tokens are those of plain decoding, bit for bit and at every temperature, and so are their log-probabilities. A token follows
from its logits and its own random number (k3/generation/sampling.py), and a proposal is kept where it is that very token; the
draft draws with the same number, so that it guesses right also where the model is undecided.

A draft's entry for a token reads its embedding and the backbone at the token before, so it stands at the token's own place; the
first token of a text has none. Legend: R rows, k tokens proposed, d hidden, and that of states.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from k3.generation.forward import around, logits
from k3.generation.past import Derived, SlotsPast
from k3.generation.states import Slots
from k3.kda import KDA
from k3.layer import MTPLayer
from k3.residual import Rows
from k3.stage import Stage
from kernels.conv.step import conv_step
from kernels.kda.step import kda_step
from parallel.megatron import gather_from_sequence_parallel_region
from parallel.tensor import own_tokens


class Drafts:
    """The draft of a whole model, which keeps its latents in the `Slots` of the rows that it follows."""

    def __init__(self, stage: Stage):
        self.stage = stage
        self.layer: MTPLayer = stage.mtp[0]  # type: ignore[assignment]

    def read(self, state: Tensor, rows: Rows) -> Tensor:
        """What it takes of the backbone's tokens, [N, d] on every tensor rank."""
        return self._whole(self.layer.read(state, rows.bank))

    def prefill(self, slots: Slots, derived: Derived, valid: Sequence[int], tokens: Tensor, features: Tensor, block: int) -> None:
        """Follows the model through blocks of every row, `slots.length` still being that before them: tokens [R, T], features
        [R T, d] as `read` gives them.
        """
        rows, size = tokens.shape
        features = features.view(rows, size, -1)
        before = torch.cat([slots.features[:rows, :1], features[:, :-1]], 1)
        past = _DraftPast(slots, derived, rows, size, first=slots.length[:rows], block=block)
        self._follow(past, tokens.flatten(), before.flatten(0, 1))
        last = torch.tensor(valid or [1], device=tokens.device) - 1
        slots.features[:rows, 0] = features[torch.arange(rows, device=tokens.device), last]

    def begin(self, slots: Slots, derived: Derived, rows: int, new: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Follows the tokens `new` that each of the first rows has got since the last time, the others none -> (the draft's state
        after the last one [R, d], its logits [R, V]).
        """
        behind = [len(tokens) for tokens in new] + [1] * (rows - len(new))
        most = max(behind)
        device = slots.shapes.device
        padded = torch.tensor([[*t, *[0] * (most - len(t))] for t in (*new, *[[0]] * (rows - len(new)))], device=device)
        first = [length - count + 1 for length, count in zip(slots.length, behind)]
        past = _DraftPast(slots, derived, rows, most, first=first)
        out = self._follow(past, padded.flatten(), slots.features[:rows, :most].flatten(0, 1))
        place = torch.arange(rows, device=device) * most + torch.tensor(behind, device=device) - 1
        return self._scored(out[place])

    def go_on(self, slots: Slots, derived: Derived, step: int, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The next of its own tokens [R], `step` places behind the rows' last ones -> as `begin`."""
        rows = len(tokens)
        first = [length + step for length in slots.length[:rows]]
        return self._scored(self._follow(_DraftPast(slots, derived, rows, 1, first=first), tokens, state))

    def _follow(self, past: SlotsPast, tokens: Tensor, features: Tensor) -> Tensor:
        """tokens [N], features [N, d] -> the layer's state [N, d] on every tensor rank."""
        state = self._own(features.unsqueeze(1))
        return self._whole(self.layer(state, self.stage.embedding(tokens.unsqueeze(0)), around(tokens, past)))

    def _scored(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return state, logits(self.stage, self._own(state.unsqueeze(1)), norm=self.layer.norm)

    def _own(self, x: Tensor) -> Tensor:
        return own_tokens(x, self.stage.world) if self.stage.world.sequence_parallel else x

    def _whole(self, x: Tensor) -> Tensor:
        world = self.stage.world
        if world.sequence_parallel and world.groups.tp.size() > 1:
            x = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False, group=world.groups.tp)
        return x.squeeze(1)


class _DraftPast(SlotsPast):
    """Place 0 holds nothing: nobody sees it but itself."""

    def __init__(self, slots: Slots, derived: Derived, rows: int, tokens: int, *, first: Sequence[int], block: int | None = None):
        super().__init__(slots, derived, rows, tokens, first=first, block=block)
        self.hidden[..., 0] |= ~self.hidden[..., 1]  # place 1 is seen, so the query stands behind place 0


class VerifyPast(SlotsPast):
    """Every new token of a row by itself, as decoding does it, and what each leaves is kept until it is known how many stay."""

    def __init__(self, slots: Slots, derived: Derived, rows: int, tokens: int):
        super().__init__(slots, derived, rows, tokens, block=1)
        self.after: dict[int, list[tuple[Tensor, Tensor]]] = {}  # of each KDA layer, after each token: state, past inputs

    def kda(self, layer: KDA, projected: Sequence[Tensor], z: Tensor, beta_logit: Tensor) -> Tensor:
        s, r, t = self.slots, self.rows, self.tokens
        i, (h, k) = s.shapes.index[layer], (layer.heads, layer.head_dim)
        _, taps, rate, bias = self.derived.kda(layer, s.shapes.math)
        x = torch.cat(list(projected), -1).view(r, t, -1).transpose(0, 1).contiguous()
        z, beta_logit = (y.reshape(r, t, h, -1).transpose(0, 1).contiguous() for y in (z, beta_logit))
        inputs, state = s.inputs[i][:, :r], s.recurrent[i][:r]
        options: dict[str, Any] = {"gate": layer.gate, "lower_bound": layer.lower_bound}
        outs, kept = [], []
        for j in range(t):
            y = conv_step(x[j], taps, inputs).view(r, 3, h, k)
            outs.append(kda_step(y[:, :2], y[:, 2], z[j], beta_logit[j].squeeze(-1), rate, bias, state, **options))
            kept.append((state.clone(), inputs.clone()))
        self.after[i] = kept
        return torch.stack(outs, 1).view(r * t, 1, h, k)

    def advance(self, counts: Sequence[int]) -> None:
        """Of row i the first `counts[i]` new tokens stay."""
        n, device = len(counts), self.slots.shapes.device
        last = torch.tensor(counts, dtype=torch.int64, device=device) - 1
        row = torch.arange(n, device=device)
        for i, kept in self.after.items():
            states, inputs = zip(*kept)
            self.slots.recurrent[i][:n] = torch.stack(states)[last, row]
            self.slots.inputs[i][:, :n] = torch.stack(inputs)[last, :, row].transpose(0, 1)
        super().advance(counts)
