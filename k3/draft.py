"""The MTP layer as a speculative draft: unrolled on its own outputs, and its loss against the frozen model (report 4.3).

Step j = 0, 1, ... at position t reads the embedding of token t + j + 1 and predicts token t + j + 2, as the model does at
position t + j + 1. What it reads as a state is the model's at t in step 0, its own last output afterwards; it sees the first
step's latents up to t, and of the later steps those of t alone: just what it has when it drafts (k3/generation/drafts.py).

Legend: T tokens of whole rows, B rows, d hidden, V vocabulary, S steps, s tensor ranks under sequence parallelism, else 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from k3.activations import Save
from k3.context import Context
from k3.head import pieces
from kernels.acceptance import acceptance_loss
from parallel.megatron import gather_from_tensor_model_parallel_region
from parallel.tensor import enter

if TYPE_CHECKING:
    from k3.layer import MTPLayer
    from k3.stage import Stage


def losses(stage: Stage, state: Tensor, bank: tuple[Tensor, ...], labels: Tensor, mask: Tensor, context: Context) -> Tensor:
    """state [T / s, B, d] and bank of the backbone, without gradients, labels [B, T], mask bool [1 + S, B, T] (row m: the target
    m + 1 tokens ahead is counted) -> [2 S, B, T]: the acceptance losses of the steps, and after them 1 where draft and model have
    the same likeliest token, else 0; both zero where not counted.
    """
    layer: MTPLayer = stage.mtp[0]  # type: ignore[assignment]
    hidden = enter(stage.norm(state), stage.world).detach()
    read = layer.read(state, bank)
    earlier: tuple[Tensor, ...] = ()
    found: list[Tensor] = []
    agreed: list[Tensor] = []
    for step in range(len(mask) - 1):
        shifted = _ahead(labels, step)
        read, latents = layer.unrolled(read, stage.embedding(shifted), context, *earlier)
        earlier = (*earlier, latents)
        loss, same = _scores(stage, layer, read, hidden, step + 1)
        counted = mask[step + 1].t()
        found.append(torch.where(counted, loss, 0.0).t())
        agreed.append(torch.where(counted, same, 0.0).t())
    return torch.stack([*found, *agreed])


def _scores(stage: Stage, layer: MTPLayer, read: Tensor, hidden: Tensor, ahead: int) -> tuple[Tensor, Tensor]:
    """[T, B] twice, of the draft's state `read` [T / s, B, d] against the model `ahead` positions on, a piece at a time."""
    positions, rows = hidden.shape[:2]
    shifted = torch.cat([hidden[ahead:], hidden[-1:].expand(min(ahead, positions), -1, -1)])[:positions]
    entered = enter(layer.norm(read), stage.world)
    policy = stage.activations.effective()

    def part(theirs: Tensor, ours: Tensor) -> tuple[Tensor, Tensor]:
        return acceptance_loss(_logits(stage, theirs), _logits(stage, ours))

    def piece(at: slice) -> tuple[Tensor, Tensor]:
        if policy.head is Save.keep or not torch.is_grad_enabled():
            return part(shifted[at], entered[at])
        return checkpoint(part, shifted[at], entered[at], use_reentrant=False, preserve_rng_state=False)

    whole = torch.empty(positions, rows, device="meta")
    loss, same = zip(*(piece(at) for at in pieces(whole, policy.head_chunk)))
    return torch.cat(loss), torch.cat(same)


def _logits(stage: Stage, hidden: Tensor) -> Tensor:
    """[..., V] on every tensor rank."""
    return gather_from_tensor_model_parallel_region(stage.head(hidden), group=stage.world.groups.tp)


def _ahead(labels: Tensor, steps: int) -> Tensor:
    """labels [B, T] shifted to the left; the last one repeats (it is never counted)."""
    steps = min(steps, labels.shape[1])
    return torch.cat([labels[:, steps:], labels[:, -1:].expand(-1, steps)], 1)
