"""The whole model against the golden vectors: logits, packing, hidden states, routes, loss, every gradient, the export."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from safetensors.torch import load_file

import k3
from k3 import hf
from k3.hf.pieces import pieces
from tests.golden.vectors import FOLDER, load, relative_error

DTYPES = [torch.float32, torch.float64]
TOLERANCE = {torch.float32: 3e-4, torch.float64: 1e-6}


@cache
def model(dtype: torch.dtype) -> torch.nn.Module:
    return hf.load(FOLDER, dtype=dtype).eval()


def published(m: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Values bound to our parameter names, renamed and cut as published."""
    table = k3.cards(m)
    out = {}
    for name, value in tensors.items():
        for piece in pieces([table[name]]):
            out[piece.name] = value[tuple(slice(*r) for r in piece.region)].reshape(piece.shape)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_and_hidden(dtype: torch.dtype) -> None:
    want = load("forward")
    m = model(dtype)
    hidden = []
    hooks = [layer.register_forward_hook(lambda _, __, out: hidden.append(out.prefix)) for layer in m.layers.values()]
    try:
        with torch.no_grad():
            logits = m(want["tokens"])
    finally:
        for hook in hooks:
            hook.remove()
    assert logits.dtype == dtype
    torch.testing.assert_close(logits.double(), want["logits"].double(), rtol=0, atol=TOLERANCE[dtype])
    got = torch.stack(hidden).permute(2, 0, 1, 3)  # [L, T, B, d] -> [B, L, T, d]
    torch.testing.assert_close(got.double(), want["hidden"].double(), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_logits(dtype: torch.dtype) -> None:
    want = load("forward")
    tokens = want["tokens"][:1]
    starts = torch.zeros_like(tokens, dtype=torch.bool)
    starts[:, want["packed_bounds"][:-1]] = True
    with torch.no_grad():
        logits = model(dtype)(tokens, document_starts=starts)[0]
    torch.testing.assert_close(logits.double(), want["packed_logits"].double(), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_routes_and_largest_logits(dtype: torch.dtype) -> None:
    want = load("forward")
    m = model(dtype).train()
    routes = []
    routers = [layer.feed_forward.router for layer in m.layers.values() if hasattr(layer.feed_forward, "router")]
    hooks = [r.register_forward_hook(lambda _, __, out: routes.append(out[0])) for r in routers]
    targets = k3.clip_targets(m)
    for target in targets:
        target.reset()
    try:
        m(want["tokens"][1:])
    finally:
        for hook in hooks:
            hook.remove()
        m.eval()
    assert torch.equal(torch.stack(routes), want["last_row_routes"])
    got = torch.stack([t.max_logits for t in targets])
    torch.testing.assert_close(
        got.double(), want["last_row_max_logits"].double(), rtol=0, atol=1e-4 if dtype == torch.float32 else 1e-6
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_and_every_gradient(dtype: torch.dtype) -> None:
    want, grads = load("forward"), load("grads")
    m = model(dtype)
    m.zero_grad()
    labels = torch.cat([want["tokens"][:, 1:], want["tokens"][:, :1]], dim=1)
    mask = torch.ones(1, *labels.shape, dtype=torch.bool)
    mask[..., -1] = False
    loss = m(want["tokens"], labels=labels, loss_mask=mask).sum() / mask.sum()
    loss.backward()
    assert loss.item() == pytest.approx(want["loss"].item(), abs=1e-5 if dtype == torch.float32 else 1e-7)
    got = published(m, {n: p.grad for n, p in m.named_parameters() if p.grad is not None})
    # what nobody reads (the first layer mixes nothing) is not in the vectors; here it has a gradient of zeros
    assert {n for n, g in got.items() if n in grads or g.any()} == set(grads)
    bound = 5e-4 if dtype == torch.float32 else 1e-6
    wrong = {n: e for n in grads if (e := relative_error(got[n], grads[n])) > bound}
    assert not wrong


def test_export_is_byte_identical(tmp_path) -> None:
    hf.save(model(torch.float32), tmp_path / "again")
    ours, theirs = load_file(tmp_path / "again" / "model.safetensors"), load_file(FOLDER / "model.safetensors")
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype and ours[name].shape == value.shape
        assert ours[name].numpy().tobytes() == value.numpy().tobytes(), name
