"""KDA on CUDA through fla-core's Triton kernels.

Written against the source of fla-core 0.6.0: `fla.ops.kda.chunk_kda`, its argument checks, its variable-length form, its gates
and its norm's eps of 1e-6 inside the root. It has not run yet, for want of a GPU; the document and state handling around the
kernel is tested on a CPU with the recurrence in the kernel's place.

In 0.6.0 a diagonal tile of the bounded gate is anchored at its first row, shifted by a constant: no later gate enters an earlier
result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels import documents

LARGEST_HEAD = 256  # fla-core's limit on K


def refuses(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> str | None:
    """Why fla-core cannot take these arguments, or None."""
    if q.device.type != "cuda":
        return f"its kernels need CUDA, q is on {q.device.type}"
    if q.dtype != torch.bfloat16:
        return f"its products are bfloat16 or TF32, q is {str(q.dtype)[6:]}"
    if q.shape[-1] > LARGEST_HEAD:
        return f"K is at most {LARGEST_HEAD}, here {q.shape[-1]}"
    try:
        import fla.ops.kda  # noqa: F401
    except Exception as error:  # a Triton or driver that does not fit raises other errors than ImportError
        return f"fla-core cannot be imported ({type(error).__name__}: {error})"
    return None


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
    """As `kernels.kda.kda`."""
    from fla.ops.kda import chunk_kda

    bounded = gate == "bounded"

    def kernel(q: Tensor, k: Tensor, v: Tensor, z: Tensor, beta_logit: Tensor, state: Tensor | None, cu_seqlens: Tensor | None):
        return chunk_kda(
            q, k, v.to(q.dtype), z, beta_logit,
            initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens,
            use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_gate_in_kernel=True,
            safe_gate=bounded, lower_bound=lower_bound if bounded else None,
            A_log=A_log.float(), dt_bias=dt_bias.float().flatten(),
        )  # fmt: skip

    return over_documents(kernel, q, k, v, z, beta_logit, initial_state, document_starts)


def over_documents(
    kernel: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta_logit: Tensor,
    initial_state: Tensor | None,
    document_starts: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Runs a kernel of the variable-length kind on a batch with a document map.

    `kernel(q, k, v, z, beta_logit, states, cu_seqlens) -> (out, final_states)` takes a batch of whole rows (cu_seqlens None) or
    one row of documents laid end to end, with one state [N, H, K, V] a document.
    """
    state = None if initial_state is None else initial_state.float()
    if document_starts is None:
        return kernel(q, k, v, z, beta_logit, state, None)
    batch, length = q.shape[:2]
    starts = documents.resolve(document_starts, batch, length, continues=state is not None, device=q.device)
    cu_seqlens = documents.offsets(starts).long()
    # segments are in row-major order: the first of row b starts at token b T, its last ends at (b + 1) T
    rows = torch.arange(batch + 1, device=q.device) * length
    edges = torch.searchsorted(cu_seqlens, rows)
    states = None
    if state is not None:
        kept = state.masked_fill(starts[:, 0, None, None, None], 0.0)
        states = kept.new_zeros(cu_seqlens.numel() - 1, *kept.shape[1:]).index_copy(0, edges[:-1], kept)
    out, finals = kernel(*(x.flatten(0, 1).unsqueeze(0) for x in (q, k, v, z, beta_logit)), states, cu_seqlens)
    return out.view(batch, length, *out.shape[2:]), finals[edges[1:] - 1]
