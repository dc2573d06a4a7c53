"""The MTP layer as a draft: it begins as the MTP layer, learns alone, and sees in training what it has when it drafts."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

import k3
import optim
import parallel
from k3.activations import ActivationConfig, Save
from k3.config import ConfigError, Residual
from k3.model import Model
from kernels.acceptance import acceptance_loss
from kernels.attention import attention
from kernels.attention.ahead import attention_ahead
from kernels.documents import fresh
from optim.config import OptimConfig
from tests.k3.randomise import randomise

STEPS = 3


def drafting(**changes: object) -> Model:
    """A randomised model of which the draft's own matrix is at its first value."""
    config = replace(k3.preset("tiny"), draft=True, **changes)  # type: ignore[arg-type]
    model = randomise(k3.build(config, dtype=torch.float64))
    first = dict(k3.build(config, dtype=torch.float64).named_parameters())["mtp.0.draft_proj.weight"]
    model.get_parameter("mtp.0.draft_proj.weight").data.copy_(first)
    return model


def rows(length: int = 24) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """tokens, document starts, labels, mask of two rows, one of them of two documents."""
    ids = torch.randint(0, 256, (2, length + 1), generator=torch.Generator().manual_seed(0))
    starts = fresh(2, length)
    starts[1, 10] = True
    from k3.stage import default_loss_mask

    return ids[:, :-1], starts, ids[:, 1:], default_loss_mask(starts, 1 + STEPS)


def test_which_blocks_it_reads() -> None:
    of = lambda **changes: replace(k3.preset("k3"), **changes).draft_blocks
    assert of() == (1, 4)
    assert of(layers=60) == (1, 4) and of(layers=48) == (1, 2) and of(layers=36) == (1, 2) and of(layers=24) == (1,)
    assert of(layers=12) == () and of(residual=Residual.sum) == ()
    with pytest.raises(ConfigError, match=r"model.draft=True.*give 1"):
        replace(k3.preset("tiny"), draft=True, mtp_layers=2).validate()


@pytest.mark.parametrize("residual", list(Residual))
def test_it_begins_exactly_as_the_mtp_layer(residual: Residual) -> None:
    model = drafting(residual=residual)
    plain = k3.build(replace(model.k3, draft=False), dtype=torch.float64)
    plain.load_state_dict({n: t for n, t in model.state_dict().items() if "draft_proj" not in n})
    tokens, starts, labels, mask = rows()
    assert torch.equal(model(tokens, starts, labels=labels), plain(tokens, starts, labels=labels))
    assert torch.equal(
        model(tokens, starts, labels=labels, loss_mask=mask, draft=True),
        plain(tokens, starts, labels=labels, loss_mask=mask, draft=True),
    )


def test_the_loss_is_how_often_the_target_accepts() -> None:
    p, q = torch.randn(2, 5, 7, dtype=torch.float64).unbind()
    q.requires_grad_()
    loss, same = acceptance_loss(p, q)
    want = torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1)
    torch.testing.assert_close((-loss).exp(), want)
    assert torch.equal(same.bool(), p.argmax(-1) == q.argmax(-1))
    (grad,) = torch.autograd.grad(loss.sum(), q)
    (wanted,) = torch.autograd.grad(-want.log().sum(), q)
    torch.testing.assert_close(grad, wanted)
    far = torch.tensor([0.0, -2000.0]), torch.tensor([-2000.0, 0.0], requires_grad=True)
    (grad,) = torch.autograd.grad(acceptance_loss(*far)[0], far[1])
    assert grad.abs().max() > 0.4 and torch.isfinite(grad).all()


def test_later_steps_see_what_a_draft_has() -> None:
    """Against plain attention over the keys laid out one after another, position by position."""
    g = torch.Generator().manual_seed(0)
    new = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    b, t, h, d, v, n = 2, 9, 3, 4, 5, 2
    q, k, value = new(b, t, h, d), new(b, t, h, d), new(b, t, h, v)
    own_k, own_v = [new(b, t, h, d) for _ in range(n)], [new(b, t, h, v) for _ in range(n)]
    starts = fresh(b, t)
    starts[1, 4] = True
    out, high = attention_ahead(q, k, value, own_k, own_v, scale=0.5, document_starts=starts)
    highest = torch.full((h,), -torch.inf, dtype=torch.float64)
    for row in range(b):
        for at in range(t):
            first = 4 if row == 1 and at >= 4 else 0
            keys = torch.cat([k[row, first : at + 1], *(x[row, at : at + 1] for x in own_k)])[None]
            values = torch.cat([value[row, first : at + 1], *(x[row, at : at + 1] for x in own_v)])[None]
            want, top = attention(q[row : row + 1, at : at + 1], keys, values, scale=0.5)
            torch.testing.assert_close(out[row, at], want[0, 0])
            highest = torch.maximum(highest, top)
    torch.testing.assert_close(high, highest)


def test_the_model_is_frozen_to_the_bit_and_the_draft_learns() -> None:
    model = drafting().train()
    k3.freeze(model, lambda card: card.name.startswith("mtp."))
    before = copy.deepcopy(model.state_dict())
    cards = k3.cards(model)
    wrapped = parallel.wrap(model, cards, model.world)
    optimizer = optim.build(
        OptimConfig(lr=0.01), cards, shards=wrapped.shards, steps=8, clip_targets=k3.clip_targets(model),
        balancing=k3.balancing(model),
    )  # fmt: skip
    assert all(name.startswith("mtp.") for name in optimizer.parameters)
    assert not any(box.name.startswith(("layers.", "embedding.", "head.")) for box in optimizer.boxes())
    tokens, starts, labels, mask = rows()
    seen = []
    for _ in range(4):
        wrapped.zero_grad()
        out = wrapped.ddps[0](tokens, starts, labels=labels, loss_mask=mask, draft=True)
        loss = out[:STEPS].sum() / mask[1:].sum()
        loss.backward()
        wrapped.finish()
        optimizer.step()
        seen.append(loss.item())
    assert seen[-1] < 0.85 * seen[0], seen
    moved = {n for n, t in model.state_dict().items() if t is not None and not torch.equal(t, before[n])}
    assert moved and all(name.startswith("mtp.0.") for name in moved)
    assert {n for n, _ in model.named_parameters() if n.startswith("mtp.")} <= moved
    assert "mtp.0.feed_forward.router.balancer.bias" in moved


def test_policies_change_no_bit() -> None:
    tokens, starts, labels, mask = rows()
    want: dict[str, torch.Tensor] = {}
    config = replace(k3.preset("tiny"), draft=True)
    for policy in (
        ActivationConfig(),
        ActivationConfig(layer=Save.recompute, head=Save.recompute),
        ActivationConfig(attention=Save.recompute, feed_forward=Save.recompute),
        ActivationConfig(head_chunk=16),
    ):
        model = randomise(k3.build(config, dtype=torch.float64, activations=policy)).train()
        k3.freeze(model, lambda card: card.name.startswith("mtp."))
        out = model(tokens, starts, labels=labels, loss_mask=mask, draft=True)
        out[:STEPS].sum().backward()
        found = {"out": out.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert all(n == "out" or n.startswith("mtp.") for n in found)
        for name, value in (want or found).items():
            torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-13)
        want = want or found
