"""A head that works on pieces of a row: the losses and gradients of the whole row, and never its logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import k3
from k3 import memory
from k3.activations import ActivationConfig, full
from k3.config import ConfigError
from k3.head import pieces
from parallel.config import ParallelConfig
from tests.k3.randomise import randomise

B, T = 2, 48
FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64


def batch(length: int = T) -> dict[str, Tensor]:
    """Two documents a row, the last tokens not counted."""
    tokens = torch.randint(0, 256, (B, length), generator=torch.Generator().manual_seed(3))
    starts = torch.zeros(B, length, dtype=torch.bool)
    starts[:, [0, 19]] = True
    mask = torch.ones(2, B, length, dtype=torch.bool)
    mask[:, :, -4:] = False
    return {"tokens": tokens, "document_starts": starts, "labels": tokens.roll(-1, 1), "loss_mask": mask}


def trained(policy: ActivationConfig, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses and gradients of one micro-batch of the tiny model, MTP included."""
    model = randomise(k3.build(k3.preset("tiny"), dtype=dtype, activations=policy)).train()
    losses = model(**batch())
    (losses * torch.linspace(0.5, 1.5, losses.numel(), dtype=losses.dtype).view_as(losses)).sum().backward()
    return losses.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("policy", [ActivationConfig(), full()], ids=["keep", "full"])
@pytest.mark.parametrize("chunk", [1, 7, 32, 10**6])
def test_pieces_compute_what_the_whole_row_does(chunk: int, policy: ActivationConfig) -> None:
    losses, gradients = trained(policy, FP64)
    got, found = trained(replace(policy, head_chunk=chunk), FP64)
    torch.testing.assert_close(got, losses, rtol=1e-13, atol=1e-13)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-13, msg=lambda text, n=name: f"{n}: {text}")


def test_a_head_of_one_piece_changes_no_loss() -> None:
    for dtype in (FP32, BF16):
        assert torch.equal(trained(ActivationConfig(), dtype)[0], trained(ActivationConfig(head_chunk=10**6), dtype)[0])


def test_the_gradient_of_a_bf16_head_is_summed_in_float32() -> None:
    """One rounding in all, not one a piece: as close to the float32 gradient as the whole row's."""
    wide = trained(ActivationConfig(), FP64)[1]["head.weight"]
    error = {}
    for chunk in (None, 2):
        found = trained(ActivationConfig(head_chunk=chunk), BF16)[1]["head.weight"]
        assert found.dtype == BF16
        error[chunk] = float((found.double() - wide).norm() / wide.norm())
    assert error[2] < 1.05 * error[None], error


@pytest.mark.parametrize("rows, positions, chunk", [(1, 10, 3), (2, 48, 32), (3, 7, 2), (1, 5, None), (4, 1, 100)])
def test_pieces_cover_every_position_once(rows: int, positions: int, chunk: int | None) -> None:
    cut = list(pieces(torch.zeros(positions, rows), chunk))
    assert [i for s in cut for i in range(s.start, s.stop)] == list(range(positions))
    if chunk is not None:
        assert all((s.stop - s.start) * rows <= max(chunk, rows) for s in cut)


def largest(run: Any, width: int) -> int:
    """The most elements that any tensor [..., width] had that an operation made."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(x, Tensor) and x.dim() and x.shape[-1] == width and x.shape[0] != 64:  # no transposed weight
                    self.most = max(self.most, x.numel())
            return out

    with Seen() as seen:
        run()
    return seen.most


@pytest.mark.parametrize("mode", ["train", "score"])
def test_no_tensor_of_logits_is_larger_than_a_piece(mode: str) -> None:
    config = replace(k3.preset("tiny"), vocab_size=331)  # no other width of the model
    tokens = batch()

    def step(policy: ActivationConfig) -> None:
        model = k3.build(config, activations=policy).train()
        if mode == "train":
            model(**tokens).sum().backward()
        else:
            tokens.pop("loss_mask", None)
            model.eval()(**tokens, score=True)

    assert largest(lambda: step(ActivationConfig()), 331) == T * B * 331
    assert largest(lambda: step(ActivationConfig(head_chunk=8)), 331) == 8 * 331


@pytest.mark.parametrize("length", [1, 13, T])
@pytest.mark.parametrize("chunk", [None, 6])
def test_scores_are_losses_and_hits_of_the_logits(length: int, chunk: int | None) -> None:
    model = randomise(k3.build(k3.preset("tiny"), dtype=FP64, activations=ActivationConfig(head_chunk=chunk))).eval()
    given = {name: x[..., :length] for name, x in batch().items() if name != "loss_mask"}
    found = model(**given, score=True)
    logits = model(given["tokens"], given["document_starts"])
    wanted = -logits.log_softmax(-1).gather(-1, given["labels"].unsqueeze(-1)).squeeze(-1)
    assert found.shape == (2, B, length) and not found.requires_grad
    torch.testing.assert_close(found[0], wanted.detach(), rtol=1e-12, atol=1e-12)
    assert torch.equal(found[1], (logits.argmax(-1) == given["labels"]).double())


def test_wrong_scores_and_chunks_are_refused() -> None:
    model = k3.build(k3.preset("tiny"))
    given = batch()
    with pytest.raises(ValueError, match="score: needs labels"):
        model(given["tokens"], score=True)
    with pytest.raises(ValueError, match=r"score: .*no loss_mask"):
        model(**given, score=True)
    with pytest.raises(ConfigError, match=r"activations\.head_chunk=0: must be at least 1"):
        k3.build(k3.preset("tiny"), activations=ActivationConfig(head_chunk=0))


def test_the_memory_of_a_loss_no_longer_grows_with_the_logits() -> None:
    config = replace(k3.preset("tiny"), vocab_size=4096)
    short, long = (memory.Share(1, n, 4, ParallelConfig()) for n in (1024, 4096))
    chunked = ActivationConfig(head_chunk=256)
    per_token = (memory.passing(config, long, chunked) - memory.passing(config, short, chunked)) / 3072
    assert per_token < 4 * config.hidden_size * 4 and memory.passing(config, long) >= 4096 * 4096 * 4
    parts = [memory.head(config, long)]
    assert memory.saved(parts, chunked) == 4096 * config.hidden_size * 4 and memory.rerun(parts, chunked) == 0
