"""Per-Head Muon: every logical matrix by itself, the recipe's update, and its size."""

import math

import pytest
import torch
from torch import Tensor

from kernels.newton_schulz import orthogonalise
from optim import batches
from optim import muon as module
from optim.config import MuonConfig, MuonPrecision, Offload, OptimConfig
from optim.home import Home
from optim.muon import Muon
from optim.table import Table, assign
from parallel.cards import CardTable, Optimizer, heads
from parallel.shards import Shards
from tests.golden.vectors import relative_error
from tests.optim import cases

LR = 0.01


def _muon(cfg: MuonConfig, tensors: dict[str, torch.nn.Parameter], cards: CardTable | None = None) -> tuple[Muon, Table]:
    cards = cards or cases.table(tensors)
    assigned = assign(cards, OptimConfig(muon=cfg))
    weights = {n: p.data for n, p in tensors.items()}
    home = Home(Offload.none, torch.device("cpu"))
    return Muon(cfg, assigned.of(Optimizer.MUON), weights, Shards.whole(cards), home), assigned


def _step(
    cfg: MuonConfig,
    gradients: list[dict[str, Tensor]],
    *,
    decay: float = 0.0,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """(weights before, weights after, report of the last step)"""
    tensors = cases.parameters(dtype)
    before = {n: p.detach().clone() for n, p in tensors.items()}
    optimizer, _ = _muon(cfg, tensors)
    after = {n: p.data for n, p in tensors.items()}
    report: dict[str, Tensor] = {}
    for grads in gradients:
        report = optimizer.step(after, grads, lr=LR, decay=decay, scale=scale)
    return before, after, report


def _gradients(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in cases.parameters(dtype, seed).items()}


def _by_hand(matrix: Tensor) -> Tensor:
    """The update of one logical matrix for lr 1."""
    return 0.2 * math.sqrt(max(matrix.shape)) * orthogonalise(matrix.unsqueeze(0))[0]


def _slices(name: str, tensor: Tensor) -> list[Tensor]:
    """The logical matrices as the card table of `cases` means them, cut out without the card."""
    kind = name.split(".")[2]
    if kind == "q":
        return [tensor[8 * h : 8 * h + 8] for h in range(4)]
    if kind == "kv":
        rows = [tensor[12 * h : 12 * h + 12] for h in range(4)]
        return [r[:8] for r in rows] + [r[8:] for r in rows]
    if kind == "gate_up":
        return [tensor[:20], tensor[20:]]
    if kind == "experts":
        return [e[:12] for e in tensor] + [e[12:] for e in tensor]
    return [tensor]


@pytest.mark.parametrize("nesterov", [True, False])
def test_two_steps_equal_the_recipe_matrix_by_matrix(nesterov: bool) -> None:
    first, second = _gradients(1), _gradients(2)
    before, after, report = _step(MuonConfig(nesterov=nesterov), [first, second], decay=0.1)
    assert set(report) == {f"layers.0.{k}.weight" for k in ("q", "kv", "o", "gate_up", "experts")}
    for name in report:
        for i, (w, got) in enumerate(zip(_slices(name, before[name]), _slices(name, after[name]))):
            w = w.clone()
            momentum = torch.zeros_like(w)
            for grads in (first, second):
                g = _slices(name, grads[name])[i]
                momentum = 0.95 * momentum + g
                change = _by_hand(g + 0.95 * momentum if nesterov else momentum)
                w = w * (1 - LR * 0.1) - LR * change
            assert relative_error(got, w) < 1e-12, (name, i)
            rms = float((LR * change).square().mean().sqrt())
            assert float(report[name][i]) == pytest.approx(rms, rel=1e-9)
    assert torch.equal(after["layers.0.norm.weight"], before["layers.0.norm.weight"])


def test_update_is_about_a_fifth_of_the_learning_rate() -> None:
    before, after, report = _step(MuonConfig(), [_gradients(1)])
    for name, rms in report.items():
        assert 0.1 * LR < float(rms.min()) and float(rms.max()) < 0.3 * LR, name
        change = after[name] - before[name]
        assert float(change.square().mean().sqrt()) == pytest.approx(float(rms.square().mean().sqrt()), rel=0.3)


def _one_loud_head(per_head: bool) -> tuple[Tensor, Tensor]:
    """Four heads, the first with a gradient 1000x larger -> RMS of each head's rows in the update, and the report."""
    rows, cols = 32, 256
    weight = torch.nn.Parameter(torch.zeros(4 * rows, cols))
    cards = CardTable({"q": cases.card("q", (4 * rows, cols), heads(("query", rows)), "attention")}, {"q": weight})
    gradient = torch.randn(4, rows, cols, generator=torch.Generator().manual_seed(0))
    gradient[0] *= 1000
    optimizer, _ = _muon(MuonConfig(per_head=per_head), {"q": weight}, cards)
    report = optimizer.step({"q": weight.data}, {"q": gradient.view(4 * rows, cols)}, lr=1.0, decay=0.0, scale=1.0)
    return weight.data.view(4, -1).square().mean(1).sqrt(), report["q"]


def test_a_loud_head_takes_the_update_of_the_whole_matrix_but_not_of_the_heads() -> None:
    whole, _ = _one_loud_head(per_head=False)
    assert float(whole[0] / whole[1:].max()) > 8
    per_head, report = _one_loud_head(per_head=True)
    assert float(per_head.max() / per_head.min()) < 1.05
    torch.testing.assert_close(report, per_head, rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ["layers.0.gate_up.weight", "layers.0.experts.weight"])
@pytest.mark.parametrize("per_head", [True, False])
def test_a_loud_part_leaves_its_neighbours_alone(name: str, per_head: bool) -> None:
    loud = _gradients(1)
    _, calm, _ = _step(MuonConfig(per_head=per_head), [loud])
    loud[name] = loud[name].clone()
    (loud[name][:20] if name.endswith("gate_up.weight") else loud[name][0, :12]).mul_(1000)
    _, after, _ = _step(MuonConfig(per_head=per_head), [loud])
    for quiet, other in zip(_slices(name, after[name])[1:], _slices(name, calm[name])[1:]):
        assert relative_error(quiet, other) < 1e-12


def test_a_zero_gradient_does_nothing_but_decay() -> None:
    zero = {n: torch.zeros_like(g) for n, g in _gradients(1).items()}
    before, after, report = _step(MuonConfig(), [zero])
    for name in report:
        assert torch.equal(after[name], before[name])
        assert not report[name].any()
    before, after, report = _step(MuonConfig(), [zero], decay=0.1)
    for name in report:
        torch.testing.assert_close(after[name], before[name] * (1 - LR * 0.1), rtol=1e-14, atol=0)


def test_an_absent_gradient_leaves_its_parameter_and_momentum() -> None:
    tensors = cases.parameters()
    optimizer, _ = _muon(MuonConfig(), tensors)
    weights = {n: p.data for n, p in tensors.items()}
    before = weights["layers.0.q.weight"].clone()
    report = optimizer.step(weights, {"layers.0.o.weight": torch.ones(32, 32)}, lr=LR, decay=0.1, scale=1.0)
    assert set(report) == {"layers.0.o.weight"}
    assert torch.equal(weights["layers.0.q.weight"], before)
    assert not optimizer.momentum["layers.0.q.weight"].any()


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_clip_coefficient_is_as_good_as_smaller_gradients(nesterov: bool) -> None:
    updates = []
    for factor, scale in ((1.0, 0.25), (0.25, 1.0)):
        tensors = cases.parameters(torch.float64)
        optimizer, _ = _muon(MuonConfig(nesterov=nesterov), tensors)
        weights = {n: p.data for n, p in tensors.items()}
        optimizer.step(weights, _gradients(1), lr=LR, decay=0.0, scale=1.0)  # an unclipped step first: Muon itself is scale-free
        optimizer.step(weights, {n: g * factor for n, g in _gradients(2).items()}, lr=LR, decay=0.0, scale=scale)
        updates.append((weights, optimizer.momentum))
    (weights, momentum), (want, want_momentum) = updates
    for name in momentum:
        torch.testing.assert_close(momentum[name], want_momentum[name], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(weights[name], want[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("limit", [1, 600, 10**9])
def test_batches_do_not_change_the_update(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    _, want, want_report = _step(MuonConfig(), [_gradients(1)])
    sizes: list[int] = []
    real = module.orthogonalise

    def watched(blocks: Tensor, **kwargs: object) -> Tensor:
        sizes.append(blocks.numel() if len(blocks) > 1 else 0)
        return real(blocks, **kwargs)

    monkeypatch.setattr(batches, "default_chunk", lambda device: limit)
    monkeypatch.setattr(module, "orthogonalise", watched)
    _, got, report = _step(MuonConfig(), [_gradients(1)])
    assert max(sizes) <= limit
    if limit == 10**9:  # q [8, 32] with kv's keys; values; o; gate and up; experts
        assert len(sizes) == 5
    for name in want_report:
        torch.testing.assert_close(got[name], want[name], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(report[name], want_report[name], rtol=1e-10, atol=0)


def test_bf16_products_are_close_and_gradients_may_be_bf16_or_strided() -> None:
    exact = _step(MuonConfig(), [_gradients(1, torch.float32)], dtype=torch.float32)[1]
    coarse = _step(MuonConfig(precision=MuonPrecision.bf16), [_gradients(1, torch.float32)], dtype=torch.float32)[1]
    name = "layers.0.o.weight"
    start = cases.parameters()[name].detach()
    assert 1e-4 < relative_error(coarse[name] - start, exact[name] - start) < 0.1
    odd = {n: g.bfloat16() for n, g in _gradients(1).items()}
    odd[name] = odd[name].t().contiguous().t()
    got = _step(MuonConfig(), [odd], dtype=torch.float32)[1]
    same = _step(MuonConfig(), [{n: g.float() for n, g in odd.items()}], dtype=torch.float32)[1]
    torch.testing.assert_close(got[name], same[name], rtol=1e-6, atol=1e-7)


def test_a_batch_is_bounded_by_the_whole_matrices_that_tensor_ranks_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "default_chunk", lambda device: 130)
    row = assign(cases.table(cases.parameters()), OptimConfig())["layers.0.o.weight"]
    pieces = [batches.Owned(row, torch.zeros(1, 4, 8), torch.zeros(1)) for _ in range(5)]
    assert [len(batch) for batch in batches.batches(pieces, 1)] == [4, 1]
    assert [len(batch) for batch in batches.batches(pieces, 2)] == [2, 2, 1]
