"""Rows that pass through pipeline stages, kept where they will be read again: only new ones travel (report 5.2.2).

A stage turns a running `prefix` and a bank of finished rows into a new prefix and a longer bank. Stage g runs on pipeline rank
g % pp, so stage g + 1 follows stage g + 1 - pp on its rank, and needs from stage g only the rows made after that one. Each rank
keeps the rows that reach it, or are made on it, until its last stage has taken them for the micro-batch at hand.

A kept row is read by later stages of the rank as a leaf of its own graph. Backward passes run in the opposite order, so when that
of the stage that received or made the row comes, every leaf has its gradient: the sum is added once, where the row came in.

Legend: C stages (pp * vpp), g a stage, T tokens of this rank, B rows of a batch, d width. Nothing here knows what makes a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parallel.stages import RowPlan


class RowError(RuntimeError):
    """What arrived is not what the plan says, or rows were left behind."""


@dataclass
class _Kept:
    """A row without its graph, and the leaves that later stages read it through."""

    row: Tensor
    readers: list[Tensor] = field(default_factory=list)

    def read(self) -> Tensor:
        leaf = self.row.detach()
        if torch.is_grad_enabled():
            leaf.requires_grad_()
            self.readers.append(leaf)
        return leaf

    def add_to(self, gradient: Tensor) -> Tensor:
        """The gradient with those of all readers, which are forgotten."""
        for leaf in self.readers:
            if leaf.grad is not None:
                gradient = gradient + leaf.grad
        self.readers.clear()
        return gradient


class RowBank:
    """The kept rows of one pipeline rank, by micro-batch. All stages of the rank share it.

    Set `micro_batch` before a stage runs: its number within the step. Empty again when the last stage of the rank has run for
    every micro-batch; `clear` empties it after an exception.
    """

    def __init__(self, plan: RowPlan):
        self.plan = plan
        self.micro_batch = 0
        self._kept: dict[int, list[_Kept]] = {}

    def __len__(self) -> int:
        """Micro-batches that rows are kept for."""
        return len(self._kept)

    def clear(self) -> None:
        self._kept.clear()

    def receive(self, stage: int, payload: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """What stage g - 1 sent, [(n + 1) T, B, d] -> (prefix [T, B, d], the whole bank, oldest row first).

        Raises RowError where rows are missing or the payload cannot be n rows and a prefix.
        """
        plan, new = self.plan, self.plan.sent(stage - 1)
        last = plan.is_last_of_rank(stage)
        before = (self._kept.pop if last else self._kept.get)(self.micro_batch, [])
        if len(before) != plan.kept(stage) or payload.shape[0] % (new + 1):
            raise RowError(
                f"stage {stage}, micro-batch {self.micro_batch}: {len(before)} rows are kept and {tuple(payload.shape)} arrived; "
                f"the plan says {plan.kept(stage)} kept and {new} rows and a prefix to arrive"
            )
        parts = payload.detach().chunk(new + 1)
        arrived = [_Kept(part) for part in parts[:-1]] if not last else []
        *rows, prefix = _Receive.apply(payload, new, arrived)
        bank = (*(kept.read() for kept in before), *rows)
        if not last:
            self._kept.setdefault(self.micro_batch, []).extend(arrived)
        return prefix, bank

    def send(self, stage: int, prefix: Tensor, bank: Sequence[Tensor]) -> Tensor:
        """What goes to stage g + 1: the rows its rank lacks and the prefix, one behind the other, [(n + 1) T, B, d].

        Raises RowError where the bank is not as long as the plan says.
        """
        plan = self.plan
        if len(bank) != plan.made[stage]:
            raise RowError(f"stage {stage}: the bank holds {len(bank)} rows, and the plan says {plan.made[stage]}")
        new = bank[len(bank) - plan.sent(stage) :]
        own = len(bank) - (plan.made[stage - 1] if stage else 0)  # rows that this stage has made: always among the new ones
        made = [] if plan.is_last_of_rank(stage) else [_Kept(row.detach()) for row in bank[len(bank) - own :]]
        if made:
            self._kept.setdefault(self.micro_batch, []).extend(made)
        return _Send.apply(made, *new, prefix)


class _Receive(torch.autograd.Function):
    """Payload -> its rows and the prefix. Backward returns each row's gradient with those of its later readers.

    One node for all: the prefix is always read, so the node always runs, also where nothing in this stage reads a row.
    """

    @staticmethod
    def forward(ctx: Any, payload: Tensor, rows: int, kept: list[_Kept]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.kept, ctx.shape = kept, payload.shape
        return payload.chunk(rows + 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None, None]:
        like = next(g for g in gradients if g is not None)
        parts = [torch.zeros_like(like) if g is None else g for g in gradients]
        for i, kept in enumerate(ctx.kept):
            parts[i] = kept.add_to(parts[i])
        return torch.cat(parts), None, None


class _Send(torch.autograd.Function):
    """Rows and the prefix -> payload. Backward adds to the gradient of each row made here those of its later readers."""

    @staticmethod
    def forward(ctx: Any, made: list[_Kept], *parts: Tensor) -> Tensor:
        ctx.made, ctx.count = made, len(parts)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        parts = list(grad_outputs[0].chunk(ctx.count))
        first = ctx.count - 1 - len(ctx.made)
        for i, kept in enumerate(ctx.made, first):
            parts[i] = kept.add_to(parts[i])
        return None, *parts
