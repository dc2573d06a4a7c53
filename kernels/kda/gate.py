"""KDA's decay gate and its numerics (report 2.1.1, spec 2.2 and 2.3).

bounded (K3):          g = lower_bound * sigmoid(x)    x = exp(A_log) (z + dt_bias)
softplus (Kimi Linear): g = -exp(A_log) softplus(z + dt_bias)

g is the log-decay of one step, at most 0. A bounded gate keeps a 16-token tile's decay representable in float32, which is what
lets a tile be a dense product; the softplus gate has no such bound.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

GATES = ("bounded", "softplus")


def check(gate: str, lower_bound: float) -> None:
    """Raises ValueError for a gate that does not exist or a bound outside [-5, 0)."""
    if gate not in GATES:
        raise ValueError(f"gate={gate!r}: no such gate; there are {', '.join(GATES)}")
    if gate == "bounded" and not -5.0 <= lower_bound < 0:
        reason = "beyond it a 16-token tile overflows float32 (report 2.1.1)"
        raise ValueError(f"lower_bound={lower_bound}: give a value in [-5, 0); {reason}")


def saturation(dtype: torch.dtype) -> float:
    """An exponent past which exp(-x) is zero and a sigmoid is exactly 0 or 1, with a zero derivative, in `dtype`."""
    return 800.0 if dtype == torch.float64 else 120.0


def log_decay(z: Tensor, rate: Tensor, dt_bias: Tensor, *, gate: str, lower_bound: float) -> Tensor:
    """The log-decay g of every step, of the broadcast shape of the arguments.

    `rate` = exp(A_log), shaped to broadcast against z [..., K] as `dt_bias` is. Differentiable. An unbounded g past
    `saturation` is clamped to it, which changes neither its effect (the decay is 0 there already) nor any gradient (0 there
    already), and keeps large numbers out of sums with small ones and of products with zero.
    """
    if gate == "softplus":
        return (-rate * F.softplus(z + dt_bias)).clamp(min=-saturation(z.dtype))
    return lower_bound * torch.sigmoid(rate * (z + dt_bias))


def log_decay_backward(dg: Tensor, g: Tensor, z: Tensor, rate: Tensor, dt_bias: Tensor, *, gate: str) -> tuple[Tensor, Tensor]:
    """(d loss / d(z + dt_bias), d loss / d A_log before the sum over channels), both of g's shape; dg is overwritten.

    The derivative of the sigmoid is sigmoid(x) sigmoid(-x): 1 - sigmoid(x) would have no correct digit at the decay floor.
    """
    limit = saturation(g.dtype)
    x = torch.add(z, dt_bias, out=torch.empty_like(g))
    if gate == "softplus":
        dg.masked_fill_(g <= -limit, 0.0)
        d_log_rate = dg * g
        return dg.mul_(x.sigmoid_()).mul_(-rate), d_log_rate
    x.mul_(rate).clamp_(-limit, limit)
    dx = dg.mul_(g).mul_(torch.sigmoid(-x))  # g = lower_bound * sigmoid(x)
    return dx * rate, x.mul_(dx)
