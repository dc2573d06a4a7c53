"""QK-Clip: the logit shrinks by exactly gamma, and only where it must."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optim.weight_clip import Clipped, check_targets, clip_weights
from parallel.clip import ClipTarget
from parallel.shards import Shard, Shards

HEADS, NOPE, ROPE, VALUE, LATENT, TAU = 3, 8, 4, 6, 16, 10.0


def _weights(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(0)
    shapes = {"q": (HEADS * (NOPE + ROPE), LATENT), "kv": (HEADS * (NOPE + VALUE), LATENT)}
    return {n: torch.randn(s, generator=gen, dtype=torch.float64).to(dtype) for n, s in shapes.items()}


def _shards(weights: dict[str, Tensor]) -> Shards:
    return Shards({n: Shard(torch.nn.Parameter(w), ((0, w.numel()),), 0, None, True) for n, w in weights.items()})


def _clip(targets: list[ClipTarget], weights: dict[str, Tensor], tau: float | None) -> Clipped:
    return clip_weights(targets, weights, _shards(weights), tau)


def _target(logits: list[float]) -> ClipTarget:
    return ClipTarget("q", "kv", NOPE, ROPE, VALUE, torch.tensor(logits))


def _logits(weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits [heads, queries, keys] from fixed inputs and a key part shared by all heads; and the values."""
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(5, LATENT, generator=gen, dtype=torch.float64)
    shared = torch.randn(5, ROPE, generator=gen, dtype=torch.float64)
    q = (x @ weights["q"].T).view(5, HEADS, NOPE + ROPE)
    kv = (x @ weights["kv"].T).view(5, HEADS, NOPE + VALUE)
    key = torch.cat([kv[..., :NOPE], shared.unsqueeze(1).expand(5, HEADS, ROPE)], -1)
    return torch.einsum("qhd,khd->hqk", q, key), kv[..., NOPE:]


def test_logits_scale_by_gamma() -> None:
    weights = _weights()
    before, values = _logits(weights)
    target = _target([40.0, 9.0, 12.5])
    clipped = _clip([target], weights, TAU)
    after, values_after = _logits(weights)
    for head, gamma in enumerate((0.25, 1.0, 0.8)):
        torch.testing.assert_close(after[head], gamma * before[head], rtol=1e-6, atol=1e-12)
    assert torch.equal(after[1], before[1])
    assert torch.equal(values_after, values)
    assert (clipped.heads, clipped.max_logit, clipped.names) == (2, 40.0, {"q", "kv"})
    assert target.max_logits.tolist() == [-torch.inf] * HEADS


def test_a_part_of_the_weights_is_clipped_alike() -> None:
    want = _weights()
    _clip([_target([40.0, 9.0, 12.5])], want, TAU)
    weights = _weights()
    for start in (0, 5, LATENT, 3 * LATENT - 1):
        for stop in (start + 1, 7 * LATENT, 9 * LATENT + 3, 36 * LATENT):
            shards = {n: Shard(torch.nn.Parameter(w), ((start, stop),), 0, None, True) for n, w in weights.items()}
            parts = {n: shard.weight.clone() for n, shard in shards.items()}
            clip_weights([_target([40.0, 9.0, 12.5])], parts, Shards(shards), TAU)
            for name, part in parts.items():
                assert torch.equal(part.flatten(), want[name].flatten()[start:stop]), (name, start, stop)
    assert clip_weights([_target([40.0, 9.0, 12.5])], {}, Shards(shards), TAU).heads == 2  # on a rank that has no part


def test_nothing_happens_below_tau_or_without_a_look() -> None:
    for logits, largest in (([9.0, 10.0, -3.0], 10.0), ([-torch.inf] * 3, None), ([torch.inf, 1.0, 1.0], torch.inf)):
        weights = _weights()
        clipped = _clip([_target(logits)], weights, TAU)
        assert (clipped.heads, clipped.max_logit, clipped.names) == (0, largest, frozenset())
        assert all(torch.equal(weights[n], w) for n, w in _weights().items())


def test_switched_off_it_still_reports_and_resets() -> None:
    weights, target = _weights(), _target([40.0, 1.0, 1.0])
    clipped = _clip([target], weights, None)
    assert (clipped.heads, clipped.max_logit) == (0, 40.0)
    assert torch.equal(weights["q"], _weights()["q"])
    assert target.max_logits.tolist() == [-torch.inf] * HEADS
    assert _clip([], weights, TAU).max_logit is None


def test_a_target_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="q of shape"):
        check_targets([ClipTarget("q", "kv", NOPE, ROPE + 1, VALUE, torch.zeros(HEADS))], _weights())
    with pytest.raises(ValueError, match="k_proj is no trained parameter"):
        check_targets([ClipTarget("q", "k_proj", NOPE, ROPE, VALUE, torch.zeros(HEADS))], _weights())
