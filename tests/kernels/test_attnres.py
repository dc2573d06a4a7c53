import pytest
import torch

from kernels.attnres import fused, mix, mix_norm, reference
from kernels.norm import rms_norm
from tests.kernels.operators import DTYPES, close, normal, same_with_gradients


@pytest.fixture(params=[1 << 20, 60], ids=["one block", "many blocks"])
def block_size(request, monkeypatch):
    monkeypatch.setattr(fused, "CPU_ELEMENTS", request.param)


def inputs_of(dtype, count=4, shape=(5, 3, 6)):
    return [
        normal(shape[-1], dtype=dtype, seed=90), normal(1, shape[-1], dtype=dtype, seed=91),
        *(normal(*shape, dtype=dtype, seed=i) for i in range(count)),
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("shape", [(7, 6), (5, 3, 6), (0, 3, 6)])
def test_equals_the_reference(dtype, count, shape, block_size):
    same_with_gradients(
        lambda g, q, *rows: mix(rows, g, q, eps=1e-5),
        lambda g, q, *rows: reference.mix(rows, g, q, eps=1e-5),
        inputs_of(dtype, count, shape), dtype,
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["batch major", "mixed"])
def test_memory_order_is_the_first_rows(layout):
    norm_weight, query, *rows = inputs_of(torch.float64)
    rows = [row.transpose(0, 1) for row in rows]  # [B, T, d] views of [T, B, d]
    if layout == "mixed":
        rows[2] = rows[2].contiguous()
    out, weights = mix(rows, norm_weight, query, eps=1e-5)
    assert out.stride() == rows[0].stride() and weights.shape == (4, 3, 5)
    same_with_gradients(
        lambda g, q, *rows: mix(rows, g, q, eps=1e-5),
        lambda g, q, *rows: reference.mix(rows, g, q, eps=1e-5),
        [norm_weight, query, *rows], torch.float64,
    )  # fmt: skip


def test_a_flat_query_is_the_same():
    norm_weight, query, *rows = inputs_of(torch.float64)
    query = query.reshape(-1).requires_grad_()
    out, _ = mix(rows, norm_weight, query, eps=1e-5)
    assert torch.equal(out, mix(rows, norm_weight, query.view(1, -1), eps=1e-5)[0])
    assert torch.autograd.grad(out.sum(), query)[0].shape == query.shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_zero_query_gives_the_mean_of_the_rows(dtype):
    norm_weight, query, *rows = inputs_of(dtype)
    out, weights = mix(rows, norm_weight, torch.zeros_like(query), eps=1e-5)
    assert (weights == 0.25).all() and not weights.requires_grad
    close(out, torch.stack([row.double() for row in rows]).mean(0).to(dtype), dtype)


def test_the_sum_is_over_rows_that_are_not_normalised_and_scores_do_not_see_their_length():
    norm_weight, query, *rows = inputs_of(torch.float64)
    out, weights = mix(rows, norm_weight, query, eps=1e-12)
    longer, same = mix([100 * rows[0], *rows[1:]], norm_weight, query, eps=1e-12)
    close(same, weights, torch.float64)
    close(longer - out, 99 * weights[0].unsqueeze(-1) * rows[0], torch.float64)


def test_gradcheck_of_every_input(block_size):
    norm_weight, query, *rows = (t.requires_grad_() for t in inputs_of(torch.float64, 3, (4, 5)))
    assert torch.autograd.gradcheck(lambda g, q, *rows: mix(rows, g, q, eps=1e-5)[0], (norm_weight, query, *rows))


def test_rows_that_need_no_gradient_get_none_and_the_others_the_same():
    norm_weight, query, *rows = inputs_of(torch.float64)
    leaves = [row.clone().requires_grad_(i % 2 == 0) for i, row in enumerate(rows)]
    mix(leaves, norm_weight, query, eps=1e-5)[0].square().sum().backward()
    whole = [row.clone().requires_grad_() for row in rows]
    mix(whole, norm_weight, query, eps=1e-5)[0].square().sum().backward()
    assert [leaf.grad is None for leaf in leaves] == [False, True, False, True]
    assert torch.equal(leaves[0].grad, whole[0].grad) and torch.equal(leaves[2].grad, whole[2].grad)


def test_rows_are_kept_by_reference_beside_three_numbers_a_token():
    _, _, *rows = inputs_of(torch.float32, 4, (16, 2, 64))
    norm_weight, query = torch.ones(64, requires_grad=True), torch.ones(64, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        mix([row.requires_grad_() for row in rows], norm_weight, query, eps=1e-5)
    pointers = {row.data_ptr() for row in rows}
    assert pointers <= {t.data_ptr() for t in kept}
    assert sum(t.numel() for t in kept if t.data_ptr() not in pointers) == 3 * 4 * 32 + 2 * 64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("shape", [(7, 6), (5, 3, 6), (0, 3, 6)])
def test_the_normed_mix_equals_the_reference(dtype, count, shape, block_size):
    same_with_gradients(
        lambda w, g, q, *rows: mix_norm(rows, g, q, w, eps=1e-5),
        lambda w, g, q, *rows: reference.mix_norm(rows, g, q, w, eps=1e-5),
        [normal(shape[-1], dtype=dtype, seed=92), *inputs_of(dtype, count, shape)], dtype,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["token major", "batch major", "mixed"])
def test_the_normed_mix_is_bitwise_the_norm_of_the_mix(dtype, layout):
    norm_weight, query, *rows = inputs_of(dtype)
    if layout != "token major":
        rows = [row.transpose(0, 1) for row in rows]
        rows[2] = rows[2].contiguous() if layout == "mixed" else rows[2]
    weight = normal(6, dtype=dtype, seed=92)
    apart, apart_weights = mix(rows, norm_weight, query, eps=1e-5)
    out, weights = mix_norm(rows, norm_weight, query, weight, eps=1e-5)
    assert torch.equal(out, rms_norm(apart, weight, eps=1e-5)) and out.stride() == apart.stride()
    assert torch.equal(weights, apart_weights) and not weights.requires_grad


def test_gradcheck_of_the_normed_mix(block_size):
    norm_weight, query, *rows = (t.requires_grad_() for t in inputs_of(torch.float64, 3, (4, 5)))
    weight = normal(5, dtype=torch.float64, seed=92).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda w, g, q, *rows: mix_norm(rows, g, q, w, eps=1e-5)[0], (weight, norm_weight, query, *rows)
    )


def test_rows_of_the_normed_mix_that_need_no_gradient_get_none():
    norm_weight, query, *rows = inputs_of(torch.float64)
    leaves = [row.clone().requires_grad_(i % 2 == 0) for i, row in enumerate(rows)]
    whole = [row.clone().requires_grad_() for row in rows]
    for some in (leaves, whole):
        mix_norm(some, norm_weight, query, norm_weight, eps=1e-5)[0].square().sum().backward()
    assert [leaf.grad is None for leaf in leaves] == [False, True, False, True]
    assert torch.equal(leaves[0].grad, whole[0].grad) and torch.equal(leaves[2].grad, whole[2].grad)


def test_the_normed_mix_saves_one_number_a_token_more():
    _, _, *rows = inputs_of(torch.float32, 4, (16, 2, 64))
    ones = [torch.ones(64, requires_grad=True) for _ in range(3)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        mix_norm([row.requires_grad_() for row in rows], *ones, eps=1e-5)
    pointers = {row.data_ptr() for row in rows}
    assert pointers <= {t.data_ptr() for t in kept}
    assert sum(t.numel() for t in kept if t.data_ptr() not in pointers) == (3 * 4 + 1) * 32 + 3 * 64


@pytest.mark.parametrize("size", [0.0, 1e-20, 1e15])
def test_extreme_rows_stay_finite(size):
    norm_weight, query, *rows = (t.requires_grad_() for t in inputs_of(torch.float32))
    out, weights = mix([row * size for row in rows], norm_weight, query, eps=1e-5)
    grads = torch.autograd.grad(out.sum(), (norm_weight, query, *rows))
    assert all(torch.isfinite(t).all() for t in (out, weights, *grads))
    normed, _ = mix_norm([row * size for row in rows], norm_weight, query, norm_weight, eps=1e-5)
    assert all(torch.isfinite(t).all() for t in (normed, *torch.autograd.grad(normed.sum(), (norm_weight, query, *rows))))


def test_wrong_arguments_are_named():
    row, weight = torch.zeros(2, 6), torch.ones(6)
    with pytest.raises(ValueError, match="no rows"):
        mix([], weight, weight, eps=1e-5)
    with pytest.raises(ValueError, match=r"row 1 is torch.float32 \(3, 6\)"):
        mix([row, torch.zeros(3, 6)], weight, weight, eps=1e-5)
    with pytest.raises(ValueError, match="width 6"):
        mix([row], weight, torch.zeros(5), eps=1e-5)
    with pytest.raises(ValueError, match="mix_norm: no rows"):
        mix_norm([], weight, weight, weight, eps=1e-5)
    with pytest.raises(ValueError, match=r"out_weight \(5,\) for rows of width 6"):
        mix_norm([row], weight, weight, torch.ones(5), eps=1e-5)
