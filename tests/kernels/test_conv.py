import itertools

import pytest
import torch

from kernels import documents
from kernels.conv import reference, shifted, short_conv
from tests.kernels.operators import DTYPES, close, normal, same_with_gradients


@pytest.fixture(params=[1 << 18, 1], ids=["one block", "many blocks"])
def block_size(request, monkeypatch):
    monkeypatch.setattr(shifted, "CPU_ELEMENTS", request.param)


def starts_of(kind: str | None, batch: int, length: int) -> torch.Tensor | None:
    if kind is None:
        return None
    if kind == "every token":
        return torch.ones(batch, length, dtype=torch.bool)
    starts = torch.rand(batch, length, generator=torch.Generator().manual_seed(3)) < 0.3
    starts[:, 0] = kind == "fresh"
    if kind == "mixed":
        starts[0, 0] = True  # one row resets, the others continue
    return starts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [None, "fresh", "mixed", "every token"])
@pytest.mark.parametrize("with_state", [False, True], ids=["no state", "state"])
def test_equals_the_reference_over_lengths_and_widths(dtype, kind, with_state, block_size):
    for length, width, time_major in itertools.product((1, 2, 3, 11), (1, 2, 4), (False, True)):
        x, weight = normal(3, length, 6, dtype=dtype), normal(6, width, dtype=dtype, seed=1)
        if dtype == torch.bfloat16:
            weight = weight.float()
        if time_major:
            x = x.transpose(0, 1).contiguous().transpose(0, 1)
        inputs = [x, weight] + ([normal(3, width - 1, 6, dtype=dtype, seed=2)] if with_state else [])
        starts = starts_of(kind, 3, length)
        explicit = documents.resolve(starts, 3, length, continues=with_state, device="cpu")

        def fast(x, weight, state=None, starts=starts):
            return short_conv(x, weight, document_starts=starts, initial_state=state)

        def slow(x, weight, state=None, explicit=explicit):
            return reference.short_conv(x, weight, document_starts=explicit, initial_state=state)

        same_with_gradients(fast, slow, inputs, dtype)


def test_memory_order_is_kept_and_slices_of_channels_are_taken():
    x = normal(7, 2, 12, dtype=torch.float32).transpose(0, 1)
    weight = normal(4, 4, dtype=torch.float32, seed=1)
    out, _ = short_conv(x, x.new_ones(12, 4))
    assert out.stride() == x.stride()
    part = x[..., 4:8]
    same_with_gradients(lambda x, w: short_conv(x, w), lambda x, w: short_conv(x.contiguous(), w), [part, weight], torch.float32)


@pytest.mark.parametrize("cut", [1, 5, 8])
def test_two_calls_joined_by_the_state_equal_one(cut):
    dtype = torch.float64
    x, weight, starts = normal(3, 9, 5, dtype=dtype), normal(5, 4, dtype=dtype, seed=1), starts_of("fresh", 3, 9)
    whole, whole_state = short_conv(x, weight, document_starts=starts)
    first, state = short_conv(x[:, :cut], weight, document_starts=starts[:, :cut])
    second, last = short_conv(x[:, cut:], weight, document_starts=starts[:, cut:], initial_state=state)
    close(torch.cat([first, second], 1), whole, dtype)
    close(last, whole_state, dtype)


def test_a_token_at_a_time_equals_the_whole():
    x, weight, starts = normal(2, 9, 5, dtype=torch.float64), normal(5, 4, dtype=torch.float64, seed=1), starts_of("fresh", 2, 9)
    whole, _ = short_conv(x, weight, document_starts=starts)
    state, pieces = x.new_zeros(2, 3, 5), []
    for t in range(9):
        piece, state = short_conv(x[:, t : t + 1], weight, document_starts=starts[:, t : t + 1], initial_state=state)
        pieces.append(piece)
    close(torch.cat(pieces, 1), whole, torch.float64)


def test_packed_documents_equal_the_documents_alone():
    dtype, bounds = torch.float64, [0, 1, 3, 8, 12]
    x, weight = normal(1, 12, 5, dtype=dtype), normal(5, 4, dtype=dtype, seed=1)
    starts = torch.zeros(1, 12, dtype=torch.bool)
    starts[0, bounds[:-1]] = True
    same_with_gradients(
        lambda x, w: [short_conv(x, w, document_starts=starts)[0]],
        lambda x, w: [torch.cat([short_conv(x[:, a:b], w)[0] for a, b in itertools.pairwise(bounds)], 1)],
        [x, weight], dtype,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_later_tokens_leave_earlier_outputs_bitwise_unchanged(dtype, block_size):
    x, weight, starts = normal(2, 40, 6, dtype=dtype), normal(6, 4, dtype=torch.float32, seed=1), starts_of("fresh", 2, 40)
    before, _ = short_conv(x, weight, document_starts=starts)
    changed, other = x.clone(), starts.clone()
    changed[:, 21:] = 1e4
    other[:, 21:] = ~other[:, 21:]
    after, _ = short_conv(changed, weight, document_starts=other)
    assert torch.equal(before[:, :21], after[:, :21]) and not torch.equal(before[:, 21:], after[:, 21:])


def test_another_document_cannot_leak_even_if_it_is_not_finite():
    x, weight = normal(1, 8, 3, dtype=torch.float32), normal(3, 4, dtype=torch.float32, seed=1)
    starts = torch.tensor([[True, False, False, False, True, False, False, False]])
    clean, _ = short_conv(x, weight, document_starts=starts)
    x[:, :4] = torch.nan
    spoilt, state = short_conv(x, weight, document_starts=starts)
    assert torch.equal(clean[:, 4:], spoilt[:, 4:]) and torch.isfinite(state).all()


def test_extreme_inputs_stay_finite():
    x = torch.tensor([-1e30, 1e30, -80.0, 1e-30]).repeat(5).reshape(1, 20, 1).requires_grad_()
    weight = torch.ones(1, 4, requires_grad=True)
    out, _ = short_conv(x, weight)
    grads = torch.autograd.grad(out.sum(), (x, weight))
    assert torch.isfinite(out).all() and all(torch.isfinite(g).all() for g in grads)


def test_only_the_inputs_are_kept_for_the_backward_pass():
    kept = []
    x, weight = normal(2, 64, 8, dtype=torch.float32).requires_grad_(), normal(8, 4, dtype=torch.float32).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        short_conv(x, weight)
    assert set(kept) == {x.data_ptr(), weight.data_ptr()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight": torch.ones(3, 4)}, "weight \\(3, 4\\)"),
        ({"initial_state": torch.zeros(2, 4, 5)}, "initial_state \\(2, 4, 5\\)"),
        ({"document_starts": torch.ones(2, 6)}, "document_starts is torch.float32"),
    ],
)
def test_wrong_arguments_are_named(change, words):
    arguments = {"x": torch.zeros(2, 6, 5), "weight": torch.ones(5, 4)} | change
    with pytest.raises(ValueError, match=words):
        short_conv(arguments.pop("x"), arguments.pop("weight"), **arguments)
