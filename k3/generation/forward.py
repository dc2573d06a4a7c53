"""One pass of new tokens through a whole model, and the logits of some of them. Legend: N tokens, d hidden, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from k3.context import Context, Past
from k3.linear import RMSNorm
from k3.residual import Rows
from k3.stage import Stage
from parallel.megatron import gather_from_tensor_model_parallel_region
from parallel.tensor import enter


def around(tokens: Tensor, past: Past) -> Context:
    """What the layers share in a pass of tokens [N]."""
    return Context(torch.empty(1, 0, dtype=torch.bool, device=tokens.device), len(tokens), past=past)


def advance(stage: Stage, tokens: Tensor, past: Past) -> tuple[Tensor, Rows]:
    """tokens [N] int64, row by row -> the final state [N / s, 1, d], s the tensor ranks under sequence parallelism, else 1, and
    the rows that it is a mix of.
    """
    context = around(tokens, past)
    rows = Rows(stage.embedding(tokens.unsqueeze(0)))
    for layer in stage.layers.values():
        rows = layer(rows, context)
    return stage.output_residual(rows), rows


def logits(stage: Stage, state: Tensor, which: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
    """The final state -> [N, V] on every tensor rank, the same bits on all; of the tokens `which` [n] alone: [n, V].

    norm: through which the head reads it; None: the model's.
    """
    normed = enter((stage.norm if norm is None else norm)(state), stage.world)
    if which is not None:
        normed = normed.index_select(0, which)
    return gather_from_tensor_model_parallel_region(stage.head(normed), group=stage.world.groups.tp).squeeze(1)
