import itertools

import pytest
import torch
import torch.nn.functional as F

from kernels.attention import BACKENDS, attention, blocks, reference
from kernels.attention.sdpa import attention as fused
from tests.kernels.operators import DTYPES, close, normal, same_with_gradients


@pytest.fixture(params=[(64, 1 << 18), (4, 1), (4, 200)], ids=["one block", "a head at a time", "blocks of all heads"])
def block_size(request, monkeypatch):
    monkeypatch.setattr(blocks, "CPU_BLOCK", request.param[0])
    monkeypatch.setattr(blocks, "CPU_SCORES", request.param[1])


def inputs_of(dtype, queries=11, keys=11, batch=3, heads=2, width=6, values=5):
    return [
        normal(batch, queries, heads, width, dtype=dtype),
        normal(batch, keys, heads, width, dtype=dtype, seed=1),
        normal(batch, keys, heads, values, dtype=dtype, seed=2),
    ]


def starts_of(batch: int, length: int, rate: float = 0.3, first: bool = True) -> torch.Tensor:
    starts = torch.rand(batch, length, generator=torch.Generator().manual_seed(3)) < rate
    starts[:, 0] = first
    return starts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (11, 11), (5, 11), (1, 9), (8, 8)])
def test_equals_the_reference(dtype, packed, queries, keys, block_size):
    starts = starts_of(3, keys, first=keys != 9) if packed else None
    same_with_gradients(
        lambda q, k, v: attention(q, k, v, scale=0.4, document_starts=starts, backend="blocks of queries"),
        lambda q, k, v: reference.attention(q, k, v, scale=0.4, document_starts=starts),
        inputs_of(dtype, queries, keys), dtype,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize(("queries", "keys"), [(11, 11), (5, 11)])
def test_the_fused_path_of_gpus_equals_the_reference(dtype, packed, queries, keys):
    starts = starts_of(3, keys) if packed else None
    same_with_gradients(
        lambda q, k, v: fused(q, k, v, scale=0.4, document_starts=starts),
        lambda q, k, v: reference.attention(q, k, v, scale=0.4, document_starts=starts),
        inputs_of(dtype, queries, keys), dtype,
    )  # fmt: skip


def test_equals_torch_at_a_real_size():
    q, k, v = inputs_of(torch.float32, 300, 300, batch=2, heads=3, width=64, values=48)
    same_with_gradients(
        lambda q, k, v: attention(q, k, v, scale=0.125)[:1],
        lambda q, k, v: [
            F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, scale=0.125).transpose(1, 2)
        ],
        [q, k, v], torch.float32,
    )  # fmt: skip


def test_max_logits_are_the_largest_scaled_logits_inside_the_mask():
    q, k, v = inputs_of(torch.float64)
    k[:, -1] = 1e3 * q[:, 0]  # a huge logit that the mask hides from every query but the last
    q[:, -1] = 0
    starts = starts_of(3, 11)
    _, largest = attention(q, k, v, scale=0.4, document_starts=starts)
    expected = torch.full((2,), -torch.inf, dtype=torch.float64)
    number = starts.long().cumsum(1)
    for b, h, i, j in itertools.product(range(3), range(2), range(11), range(11)):
        if j <= i and number[b, i] == number[b, j]:
            expected[h] = max(expected[h], 0.4 * torch.dot(q[b, i, h], k[b, j, h]))
    close(largest, expected, torch.float64)
    assert not largest.requires_grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_later_tokens_leave_earlier_outputs_bitwise_unchanged(dtype, packed, block_size):
    q, k, v = inputs_of(dtype, 90, 90)
    starts = starts_of(3, 90, 0.05) if packed else None
    before, _ = attention(q, k, v, scale=0.4, document_starts=starts)
    for t in (q, k, v):
        t[:, 37:] = normal(*t[:, 37:].shape, dtype=dtype, seed=9) * 30
    if packed:
        starts[:, 37:] = ~starts[:, 37:]
    after, _ = attention(q, k, v, scale=0.4, document_starts=starts)
    assert torch.equal(before[:, :37], after[:, :37]) and not torch.equal(before[:, 37:], after[:, 37:])


def test_packed_documents_equal_the_documents_alone(block_size):
    bounds = [0, 1, 3, 17, 25, 40]
    starts = torch.zeros(1, 40, dtype=torch.bool)
    starts[0, bounds[:-1]] = True

    def alone(q, k, v):
        parts = [attention(q[:, a:b], k[:, a:b], v[:, a:b], scale=0.4) for a, b in itertools.pairwise(bounds)]
        return torch.cat([out for out, _ in parts], 1), torch.stack([top for _, top in parts]).amax(0)

    same_with_gradients(
        lambda q, k, v: attention(q, k, v, scale=0.4, document_starts=starts), alone,
        inputs_of(torch.float64, 40, 40, batch=1), torch.float64,
    )  # fmt: skip


def test_time_major_views_and_expanded_keys():
    q, k, v = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in inputs_of(torch.float64))
    k = k[:, :, :1].expand(-1, -1, 2, -1)
    same_with_gradients(
        lambda q, k, v: attention(q, k, v, scale=0.4),
        lambda q, k, v: attention(q.contiguous(), k.contiguous(), v.contiguous(), scale=0.4),
        [q, k, v], torch.float64,
    )  # fmt: skip


def test_huge_logits_stay_finite():
    q, k, v = (t.requires_grad_() for t in inputs_of(torch.float32))
    out, largest = attention(q * 1e4, k * 1e4, v, scale=1.0)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert torch.isfinite(out).all() and torch.isfinite(largest).all() and all(torch.isfinite(g).all() for g in grads)


def test_scores_of_a_long_sequence_are_never_in_memory_at_once():
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.append(out.numel() if isinstance(out, torch.Tensor) else 0)
            return out

    q, k, v = (t.requires_grad_() for t in inputs_of(torch.float32, 1024, 1024, batch=1, heads=2, width=8, values=8))
    with Watch():
        attention(q, k, v, scale=0.4)[0].sum().backward()
    assert max(sizes) <= 2 * 64 * 1024 and 2 * 1024 * 1024 not in sizes


def test_gradcheck():
    starts = torch.tensor([[True, False, False, True, False, False]])
    inputs = [t.requires_grad_() for t in inputs_of(torch.float64, 4, 6, batch=1)]
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, scale=0.4, document_starts=starts)[0], inputs)


@pytest.mark.parametrize(
    ("q", "k", "v", "words"),
    [
        ((2, 5, 3, 4), (2, 4, 3, 4), (2, 4, 3, 4), "5 queries but 4 keys"),
        ((2, 4, 3, 4), (2, 4, 2, 4), (2, 4, 2, 4), "do not fit"),
        ((2, 4, 3, 4), (2, 4, 3, 4), (2, 5, 3, 4), "do not fit"),
        ((4, 3, 4), (4, 3, 4), (4, 3, 4), "batch, time, heads, width"),
    ],
)
def test_wrong_shapes_are_named(q, k, v, words):
    with pytest.raises(ValueError, match=words):
        attention(torch.zeros(q), torch.zeros(k), torch.zeros(v), scale=1.0)


def test_mixed_dtypes_and_unknown_backends_are_named():
    q, k, v = inputs_of(torch.float32)
    with pytest.raises(ValueError, match="give all three one dtype"):
        attention(q, k, v.double(), scale=1.0)
    with pytest.raises(ValueError, match="no backend named 'nothing'; there are " + ", ".join(b.name for b in BACKENDS)):
        attention(q, k, v, scale=1.0, backend="nothing")
