"""World, gradient buffers, schedule, cross-entropy and dispatch in a single process, against plain autograd and megatron-core."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import k3
import parallel
from parallel.config import ParallelConfig, ParallelError, data_parallel_size
from parallel.cross_entropy import cross_entropy


def test_sizes_that_cannot_run_are_named() -> None:
    with pytest.raises(ParallelError) as caught:
        parallel.check_sizes(ParallelConfig(vpp=2, cp=0, sp=False))
    assert "parallel.vpp=2: virtual stages need parallel.pp" in str(caught.value)
    assert "parallel.cp=0: must be at least 1" in str(caught.value)
    with pytest.raises(ParallelError, match=r"parallel\.sp=true"):
        parallel.check_sizes(ParallelConfig(sp=True))
    with pytest.raises(ParallelError, match="device=cuda"):
        parallel.start(device="cuda")
    with pytest.raises(ParallelError, match="device=tpu"):
        parallel.start(device="tpu")


def test_data_parallel_size_is_the_least_that_fits() -> None:
    assert data_parallel_size(ParallelConfig()) == 1
    assert data_parallel_size(ParallelConfig(tp=2, ep=8)) == 4
    assert data_parallel_size(ParallelConfig(cp=3, ep=4)) == 4
    assert data_parallel_size(ParallelConfig(ep=4, dp=8)) == 8


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-13), (torch.bfloat16, 2e-2)])
def test_cross_entropy(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    group = parallel.start().groups.tp
    logits = (torch.randn(7, 3, 50, dtype=dtype) * 5).requires_grad_()
    labels = torch.randint(0, 50, (7, 3))
    mask = torch.rand(7, 3) > 0.3
    labels[~mask] = -100  # anything
    upstream = torch.randn(7, 3, dtype=torch.float64)
    got = cross_entropy(logits, labels, mask, group)
    wide = torch.promote_types(dtype, torch.float32)
    want = F.cross_entropy(logits.to(wide).flatten(0, 1), labels.flatten(), reduction="none").view(7, 3)
    assert got.dtype == wide
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    (a,) = torch.autograd.grad(got, logits, upstream.to(wide))
    (b,) = torch.autograd.grad(want, logits, upstream.to(wide))
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_cross_entropy_agrees_with_megatron_core() -> None:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    torch.manual_seed(0)
    world = parallel.start()
    logits, labels = torch.randn(9, 2, 64), torch.randint(0, 64, (9, 2))
    everywhere = torch.ones(9, 2, dtype=torch.bool)
    got = cross_entropy(logits, labels, everywhere, world.groups.tp)
    torch.testing.assert_close(got, vocab_parallel_cross_entropy(logits.clone(), labels, tp_group=world.groups.tp))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_step_accumulates_what_autograd_sums(dtype: torch.dtype) -> None:
    """Through megatron-core's buffers and schedule in three micro-batches, against one plain backward pass."""
    world = parallel.start()
    x = torch.randint(0, 256, (6, 20), generator=torch.Generator().manual_seed(0))
    labels = x.roll(-1, 1)
    plain = k3.build(k3.preset("tiny"), world, dtype=dtype)
    (plain(x, labels=labels)[0].sum() / x.numel()).backward()

    stage = k3.build(k3.preset("tiny"), world, dtype=dtype)
    wrapped = parallel.wrap(stage, k3.cards(stage), world)

    def forward(model: torch.nn.Module, part: slice) -> torch.Tensor:
        return model(x[part], labels=labels[part])

    def loss(part: slice, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value = losses[0].sum() / x.numel()
        return value, value.detach()

    for _ in range(2):  # the second time shows that the buffers are cleared
        wrapped.zero_grad()
        reports = parallel.run_step(wrapped, [slice(0, 2), slice(2, 4), slice(4, 6)], forward, loss)
    assert len(reports) == 3
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.1}[dtype]
    for (name, p), q in zip(stage.named_parameters(), plain.parameters(), strict=True):
        assert p.main_grad.dtype == (torch.float64 if dtype == torch.float64 else torch.float32), name
        want = torch.zeros_like(q) if q.grad is None else q.grad
        error = (p.main_grad.double() - want.double()).norm()
        assert error <= tolerance * want.double().norm() + 1e-12, name


def test_dispatch_returns_each_token_s_weighted_sum() -> None:
    from k3.backend import megatron_config
    from parallel.experts import AllToAll

    torch.manual_seed(0)
    world = parallel.start()
    config = k3.preset("tiny")
    dispatch = AllToAll(megatron_config(config, world, torch.float64), 16, world)
    tokens = torch.randn(13, 8, dtype=torch.float64)
    chosen = torch.stack([torch.randperm(16)[:2] for _ in range(13)])
    weights = torch.rand(13, 2, dtype=torch.float64)
    routed = dispatch.dispatch(tokens, chosen, weights)
    assert torch.equal(routed.counts, torch.bincount(chosen.flatten(), minlength=16)) and routed.tokens.shape == (26, 8)
    expert = torch.repeat_interleave(torch.arange(16), routed.counts).double()
    out = dispatch.combine(routed.tokens * ((expert + 1) * routed.probabilities)[:, None])
    want = tokens * ((chosen + 1) * weights).sum(1, keepdim=True)
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize(
    "flag, value", [("batch_p2p_comm", True), ("variable_seq_lengths", False), ("overlap_moe_expert_parallel_comm", True)]
)
def test_flags_that_a_pipeline_cannot_take_are_refused(flag: str, value: bool) -> None:
    world = parallel.start()
    stage = k3.build(k3.preset("tiny"), world)
    config = stage.stages[0].config
    config.batch_p2p_comm, config.variable_seq_lengths = False, True
    setattr(config, flag, value)
    with pytest.raises(ParallelError, match=f"^{flag}={value}: "):
        parallel.wrap(stage, k3.cards(stage), replace(world, config=ParallelConfig(pp=2)))
