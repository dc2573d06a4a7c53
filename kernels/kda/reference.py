"""KDA as its definition reads: one token after the other (report equation 1, spec 2.1). Slow and obvious."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import documents
from kernels.kda.gate import log_decay

NORM_EPS = 1e-6  # added to the sum of squares of q and of k


def unit(x: Tensor) -> Tensor:
    """x over its L2 norm along the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta_logit: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    gate: str = "bounded",
    lower_bound: float = -5.0,
    initial_state: Tensor | None = None,
    document_starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `kernels.kda.kda`, with gradients by autograd."""
    batch, length, heads, width = q.shape
    math = torch.float64 if q.dtype == torch.float64 else torch.float32
    starts_BT = documents.resolve(document_starts, batch, length, continues=initial_state is not None, device=q.device)
    q_BTHK = unit(q.to(math)) * width**-0.5
    k_BTHK = unit(k.to(math))
    v_BTHV = v.to(math)
    beta_BTH = torch.sigmoid(beta_logit.to(math))
    rate_H1 = A_log.to(math).exp()[:, None]
    alpha_BTHK = log_decay(z.to(math), rate_H1, dt_bias.to(math), gate=gate, lower_bound=lower_bound).exp()

    if initial_state is None:
        state_BHKV = v_BTHV.new_zeros(batch, heads, width, v.shape[-1])
    else:
        state_BHKV = initial_state.to(math)
    out = []
    for t in range(length):
        state_BHKV = state_BHKV.masked_fill(starts_BT[:, t, None, None, None], 0.0)
        state_BHKV = alpha_BTHK[:, t, :, :, None] * state_BHKV
        read_BHV = torch.einsum("bhkv,bhk->bhv", state_BHKV, k_BTHK[:, t])
        write_BHV = beta_BTH[:, t, :, None] * (v_BTHV[:, t] - read_BHV)
        state_BHKV = state_BHKV + k_BTHK[:, t, :, :, None] * write_BHV[:, :, None, :]
        out.append(torch.einsum("bhkv,bhk->bhv", state_BHKV, q_BTHK[:, t]))
    return torch.stack(out, 1).to(q.dtype), state_BHKV
