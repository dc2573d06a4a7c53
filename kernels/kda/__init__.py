"""Kimi Delta Attention (report 2.1): a gated delta rule whose state decays per key channel.

`reference` is the recurrence as defined, `chunked` the fast plain-torch form with a hand-written backward pass, `fla` the CUDA
path.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernels.dispatch import Backend, choose
from kernels.kda import chunked, fla, gate, reference
from kernels.kda.linked import Link, compose

_FLA = Backend("fla", fla.kda, fla.refuses)
_CHUNKED = Backend("chunked", chunked.kda)
_RECURRENT = Backend("recurrent", reference.kda)
BACKENDS = (_FLA, _CHUNKED, _RECURRENT)
# A few tokens, as in generation, are not worth a chunk.
FEW_TOKENS = 3


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
    link: Link | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs KDA over a batch (report equation 1 and section 2.1.1). Per head, with a state S [K, V]:

        S' = Diag(exp(g_t)) S_{t-1}      S_t = S' + beta_t k_t (v_t - S'^T k_t)^T      o_t = S_t^T q_t / sqrt(K)

    Args:
        q, k: [B, T, H, K], raw: both are divided by their L2 norm here (1e-6 added to the sum of squares).
        v: [B, T, H, V].
        z: [B, T, H, K], the decay projection's output, without dt_bias.
        beta_logit: [B, T, H]; beta = sigmoid(beta_logit).
        A_log: [H].
        dt_bias: [H, K].
        gate: "bounded" (K3), g = lower_bound sigmoid(exp(A_log) (z + dt_bias)), or "softplus" (Kimi Linear),
            g = -exp(A_log) softplus(z + dt_bias), which has no bound: lower_bound is not used.
        lower_bound: of the bounded gate, in [-5, 0).
        initial_state: [B, H, K, V], the state before each row's first token, or None for zeros.
        document_starts: bool [B, T], true at each document's first token, where the state starts from zero. True at position 0
            drops `initial_state`, false there continues from it. None: one document a row, continuing `initial_state` if given.
        link: the batch is one stretch of longer rows, and the state comes from the stretches before it, instead of
            `initial_state`; see kernels/kda/linked.py. A stretch that begins a row is given zeros.
        backend: "fla", "chunked" or "recurrent" to force a path; None takes the fastest that fits.

    Returns:
        out [B, T, H, V] in q's dtype and the state after each row's last token, [B, H, K, V].

    The computation and the state are float64 where q is float64, else float32. All tensor arguments get gradients. A change of
    later tokens leaves the outputs of earlier ones bitwise unchanged on the chunked and recurrent paths.

    Raises:
        ValueError: a shape, gate, bound or backend that does not fit; the message names it.
    """
    _check(q, k, v, z, beta_logit, A_log, dt_bias, initial_state, gate, lower_bound)
    order = (_FLA, _RECURRENT, _CHUNKED) if q.shape[1] <= FEW_TOKENS else BACKENDS
    path = choose("kda", order, q, k, v, only=backend)
    inputs = (q, k, v, z, beta_logit, A_log, dt_bias)
    options: dict[str, Any] = {"gate": gate, "lower_bound": lower_bound, "document_starts": document_starts}
    if link is None:
        return path.run(*inputs, initial_state=initial_state, **options)
    if initial_state is not None:
        raise ValueError("kda: initial_state and link are both given; a linked stretch gets its state from the link")
    if path is _CHUNKED:
        return path.run(*inputs, link=link, **options)
    return compose(path.run, link, *inputs, **options)


def _check(
    q: Tensor, k: Tensor, v: Tensor, z: Tensor, beta_logit: Tensor, A_log: Tensor, dt_bias: Tensor,
    initial_state: Tensor | None, kind: str, lower_bound: float,
) -> None:  # fmt: skip
    gate.check(kind, lower_bound)
    if q.dim() != 4 or 0 in q.shape or v.dim() != 4 or not q.is_floating_point():
        given = f"q is {q.dtype} of shape {tuple(q.shape)}, v of shape {tuple(v.shape)}"
        raise ValueError(f"{given}; give floating-point [B, T, H, K] and [B, T, H, V], none empty")
    batch, length, heads, width = q.shape
    expected: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "k": (k, (batch, length, heads, width)),
        "v": (v, (batch, length, heads, v.shape[-1])),
        "z": (z, (batch, length, heads, width)),
        "beta_logit": (beta_logit, (batch, length, heads)),
        "A_log": (A_log, (heads,)),
        "dt_bias": (dt_bias, (heads, width)),
        "initial_state": (initial_state, (batch, heads, width, v.shape[-1])),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; beside q of shape {tuple(q.shape)} give it {shape}")


__all__ = ["Link", "kda"]
