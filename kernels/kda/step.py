"""KDA for one more token of every row, the state changed in place: what generation runs (report equation 1).

With a = exp(g), S the state before and w = beta (v - (a k)^T S):    S' = Diag(a) S + k w^T      o = (a q)^T S + (q . k) w
so both reads are one product with the state as it lies, which is then passed over twice. Legend: R rows, H heads, K and V widths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.fastmath import exp_
from kernels.kda.gate import log_decay
from kernels.kda.reference import NORM_EPS


def kda_step(
    q_k: Tensor,
    v: Tensor,
    z: Tensor,
    beta_logit: Tensor,
    rate: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    *,
    gate: str = "bounded",
    lower_bound: float = -5.0,
) -> Tensor:
    """q_k [R, 2, H, K] raw queries and keys, v [R, H, V], z [R, H, K], beta_logit [R, H], rate = exp(A_log) [H, 1], dt_bias
    [H, K] -> out [R, H, V] in v's dtype. state [R, H, K, V], in the dtype of the computation, is overwritten. No gradients.

    A row's result depends on no other row, bitwise, where R is a multiple of 16 and one thread computes.
    """
    math = state.dtype
    rows, heads, width = z.shape
    unit = q_k.to(math)
    unit = unit * torch.rsqrt(torch.linalg.vector_norm(unit, dim=-1, keepdim=True).square_().add_(NORM_EPS))
    unit[:, 0] *= width**-0.5
    decay = exp_(log_decay(z.to(math), rate, dt_bias, gate=gate, lower_bound=lower_bound))
    decayed = (unit * decay.unsqueeze(1)).transpose(1, 2)  # [R, H, 2, K]
    flat = state.view(rows * heads, width, -1)
    reads = torch.bmm(decayed.reshape(rows * heads, 2, width), flat).view(rows, heads, 2, -1)
    write = torch.sub(v.to(math), reads[:, :, 1]).mul_(torch.sigmoid(beta_logit.to(math)).unsqueeze(-1))
    along = torch.linalg.vecdot(unit[:, 0], unit[:, 1]).unsqueeze(-1)
    out = torch.addcmul(reads[:, :, 0], along, write)
    state.mul_(decay.unsqueeze(-1))
    flat.baddbmm_(unit[:, 1].reshape(rows * heads, width, 1), write.view(rows * heads, 1, -1))
    return out.to(v.dtype)
