"""Causal attention over packed documents, with the largest logit of each head (report 2.1.2)."""

from __future__ import annotations

from torch import Tensor

from kernels import documents
from kernels.attention import blocks, reference, sdpa
from kernels.dispatch import Backend, choose

BACKENDS = (
    Backend("torch fused attention", sdpa.attention, sdpa.refuses),
    Backend("blocks of queries", blocks.attention),
    Backend("reference", reference.attention),
)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, document_starts: Tensor | None = None, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T + mask) v for the last Tq of Tk positions; a query sees the keys of its own document up to itself.

    q [B, Tq, H, D], k [B, Tk, H, D], v [B, Tk, H, Dv]; Tq <= Tk, Dv may differ from D. scale is D^-0.5 in K3 (no position
    encoding). document_starts: bool [B, Tk], true at each document's first token, or None for one document a row.
    `backend` forces one of BACKENDS by name.

    Returns out [B, Tq, H, Dv] in q's dtype and max_logits [H], the largest scaled logit inside the mask over batch and
    positions (float32, float64 for float64 input; detached: it steers the weight clip). Sums run in float32 (float64 for
    float64 input), and so does the output until its last rounding. Later tokens never change an earlier output, bitwise.
    Raises ValueError for shapes that do not fit together.
    """
    _check(q, k, v)
    if document_starts is not None:
        document_starts = documents.resolve(document_starts, k.shape[0], k.shape[1], continues=False, device=k.device)
    chosen = choose("attention", BACKENDS, q, k, v, only=backend)
    return chosen.run(q, k, v, scale=scale, document_starts=document_starts)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"attention takes [batch, time, heads, width] tensors; got {shapes}")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:]:
        raise ValueError(f"attention: {shapes} do not fit: give q [B, Tq, H, D], k [B, Tk, H, D], v [B, Tk, H, Dv]")
    if q.shape[1] > k.shape[1]:
        raise ValueError(
            f"attention: {q.shape[1]} queries but {k.shape[1]} keys; the queries are the last of the keys' positions"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"attention: q is {q.dtype}, k is {k.dtype}, v is {v.dtype}; give all three one dtype")
