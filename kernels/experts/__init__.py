"""The routed experts of one rank as grouped matrix products (report 2.3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from kernels.dispatch import Backend, choose
from kernels.experts.grouped import LIBRARY, PADDED, SINGLE, GroupedLinear, Way, even, library_refuses, padded_refuses
from kernels.no_grad import call


class Activation(Protocol):
    """`kernels.situ.situ_glu`, `kernels.situ.swiglu` or a partial of one."""

    def __call__(self, gate: Tensor, up: Tensor, *, scale: Tensor | None = None) -> Tensor: ...


def _with(way: Way) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def run(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        return call(GroupedLinear, way, x, weight, counts)

    return run


BACKENDS = (
    Backend("grouped product", _with(LIBRARY), library_refuses),
    Backend("padded batch", _with(PADDED), padded_refuses),
    Backend("one expert at a time", _with(SINGLE)),
)


def grouped_mlp(
    x: Tensor,
    counts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation,
    probs: Tensor | None,
    *,
    inputs: Callable[[Tensor], Tensor] | None = None,
    backend: str | None = None,
) -> Tensor:
    """down_e activation(gate_e x, up_e x, scale=probs) for every token and the expert e it was sent to.

    x [N, l], sorted by expert; N may be 0. counts [E] int64: tokens of each local expert, zeros allowed, their sum is N.
    gate_up [E, 2f, l], the gate's rows first; down [E, l, f]. probs [N]: routing weights, applied between the two maps (so
    their gradient needs no expert output), or None. `inputs` changes what enters each of the two maps, [N, l] and [N, f], such
    as by rounding it; None: nothing. `backend` forces one of BACKENDS by name. Returns [N, l].

    Products run in x's dtype (float32, bfloat16 or float64), which the weights share. Nothing waits for the device on the
    grouped product; the padded batch reads the counts. Raises ValueError for shapes, dtypes or counts that do not fit.
    """
    _check(x, counts, gate_up, down, probs)
    if backend is None and not torch.is_grad_enabled() and (spread := even(x, counts)) is not None:
        batch, places = spread
        if probs is not None:
            probs = probs.new_zeros(batch.shape[:2]).flatten().index_copy_(0, places, probs).view(batch.shape[:2])
        gate, up = torch.bmm(inputs(batch) if inputs else batch, gate_up.transpose(1, 2)).chunk(2, -1)
        inner = activation(gate, up, scale=probs)
        out = torch.bmm(inputs(inner) if inputs else inner, down.transpose(1, 2))
        return out.flatten(0, 1).index_select(0, places)
    run = choose("experts", BACKENDS, x, counts, gate_up, down, only=backend).run
    gate, up = run(inputs(x) if inputs else x, gate_up, counts).chunk(2, -1)
    inner = activation(gate, up, scale=probs)
    return run(inputs(inner) if inputs else inner, down, counts)


def _check(x: Tensor, counts: Tensor, gate_up: Tensor, down: Tensor, probs: Tensor | None) -> None:
    shapes = f"x {tuple(x.shape)}, counts {tuple(counts.shape)}, gate_up {tuple(gate_up.shape)}, down {tuple(down.shape)}"
    if x.dim() != 2 or counts.dim() != 1 or gate_up.dim() != 3 or down.dim() != 3:
        raise ValueError(f"grouped_mlp: {shapes}; give x [N, l], counts [E], gate_up [E, 2f, l], down [E, l, f]")
    experts, width, inner = counts.shape[0], x.shape[1], down.shape[2]
    if tuple(gate_up.shape) != (experts, 2 * inner, width) or tuple(down.shape) != (experts, width, inner):
        raise ValueError(f"grouped_mlp: {shapes} do not fit; give x [N, l], counts [E], gate_up [E, 2f, l], down [E, l, f]")
    if not x.dtype == gate_up.dtype == down.dtype:
        raise ValueError(f"grouped_mlp: x is {x.dtype}, gate_up {gate_up.dtype}, down {down.dtype}; give all three one dtype")
    if counts.dtype != torch.int64:
        raise ValueError(f"grouped_mlp: counts is {counts.dtype}; give int64")
    if probs is not None and tuple(probs.shape) != (x.shape[0],):
        raise ValueError(f"grouped_mlp: probs {tuple(probs.shape)}; give one number a token, ({x.shape[0]},)")
    # on a GPU this would wait for the device, so there the caller's word is taken
    if counts.device.type == "cpu" and int(counts.sum()) != x.shape[0]:
        raise ValueError(f"grouped_mlp: counts sum to {int(counts.sum())}, x has {x.shape[0]} tokens; give one count an expert")
