"""KDA over the stretches of a row, linked by states alone, is KDA over the whole row, to the last gradient."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernels.kda import kda
from tests.kernels.test_kda import assert_close, draw, run, starts_of


class Chain:
    """The stretches of one process, one after the other: forward from the first, backward from the last."""

    def __init__(self) -> None:
        self.state: Tensor | None = None
        self.d_state: Tensor | None = None

    def link(self) -> Chain.Link:
        return Chain.Link(self)

    class Link:
        def __init__(self, chain: Chain):
            self.chain = chain

        def incoming(self, fragment: Tensor) -> Tensor:
            keys = fragment.shape[-2]
            self.map, made = fragment[..., :keys], fragment[..., keys:]
            state = torch.zeros_like(made) if self.chain.state is None else self.chain.state
            self.chain.state = self.map @ state + made
            return state

        def gradient(self, d_incoming: Tensor) -> Tensor:
            d_state = torch.zeros_like(d_incoming) if self.chain.d_state is None else self.chain.d_state
            self.chain.d_state = d_incoming + self.map.mT @ d_state
            return d_state


def in_stretches(inputs: dict[str, Tensor], cuts: list[int], starts: Tensor, **options) -> dict[str, Tensor]:
    """As `run`, without gradients of the final state: the row's stretches one by one."""
    leaves = {n: t.detach().clone().requires_grad_() for n, t in inputs.items()}
    chain, outs = Chain(), []
    edges = [0, *cuts, starts.shape[1]]
    for first, last in pairwise(edges):
        part = {n: t if n in ("A_log", "dt_bias") else t[:, first:last] for n, t in leaves.items()}
        outs.append(kda(**part, document_starts=starts[:, first:last], link=chain.link(), **options)[0])
    out = torch.cat(outs, 1)
    generator = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype))
    assert chain.state is not None
    return {"out": out.detach(), "final_state": chain.state.detach()} | {f"d_{n}": t.grad for n, t in leaves.items()}


def whole(inputs: dict[str, Tensor], starts: Tensor, **options) -> dict[str, Tensor]:
    leaves = {n: t.detach().clone().requires_grad_() for n, t in inputs.items()}
    out, final = kda(**leaves, document_starts=starts, **options)
    generator = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype))
    return {"out": out.detach(), "final_state": final.detach()} | {f"d_{n}": t.grad for n, t in leaves.items()}


MAPS = {
    "one document a row": [(0, 0), (1, 0)],
    "a document across both cuts": [(0, 0), (0, 20), (1, 0)],
    "a document at a cut": [(0, 0), (0, 64), (1, 0), (1, 100)],
    "many in one stretch": [(0, 0), *((0, 66 + 3 * i) for i in range(11)), (1, 0), (1, 1), (1, 65)],
}


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("backend", ["chunked", "recurrent"])
def test_stretches_are_the_whole(backend: str, name: str, gate: str) -> None:
    inputs = draw(2, 150, 2, 8, 12, seed=3)
    starts = starts_of(2, 150, *MAPS[name])
    want = whole(inputs, starts, gate=gate, backend="recurrent")
    got = in_stretches(inputs, [64, 100], starts, gate=gate, backend=backend)
    assert_close(got, want, 1e-11)


def test_float32_in_stretches_is_as_near_the_truth_as_float32_in_one_piece() -> None:
    inputs = draw(1, 256, 2, 16, 16, seed=4)
    starts = starts_of(1, 256, (0, 0))
    truth = whole(inputs, starts, backend="recurrent")
    single = {n: t.float() for n, t in inputs.items()}
    one, parts = whole(single, starts), in_stretches(single, list(range(32, 256, 32)), starts)
    for name, want in truth.items():
        errors = [(x[name].double() - want).norm().item() for x in (one, parts)]
        assert errors[1] <= 2 * errors[0] + 1e-6 * want.norm().item(), f"{name}: {errors}"


def test_an_ignored_link_is_noticed() -> None:
    """The comparison above can fail: stretches that begin from zero give other outputs."""
    inputs = draw(1, 96, 2, 8, 8, seed=5)
    starts = starts_of(1, 96, (0, 0))
    whole_run = run(inputs, document_starts=starts)
    cut = [kda(**{n: t if n in ("A_log", "dt_bias") else t[:, a : a + 48] for n, t in inputs.items()})[0] for a in (0, 48)]
    assert (torch.cat(cut, 1) - whole_run["out"]).norm() > 1e-3 * whole_run["out"].norm()


def test_a_state_and_a_link_contradict() -> None:
    inputs = draw(1, 32, 1, 8, 8, state=True)
    with pytest.raises(ValueError, match="initial_state and link are both given"):
        kda(**inputs, link=Chain().link())
