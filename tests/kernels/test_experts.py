import pytest
import torch

from kernels.experts import BACKENDS, grouped_mlp, reference
from kernels.situ import situ_glu, swiglu
from tests.kernels.operators import DTYPES, normal, same_with_gradients

NAMES = [backend.name for backend in BACKENDS]
EVEN, ZEROS, SKEWED, ALL_IN_ONE = [3, 4, 3, 4], [5, 0, 4, 5], [0, 1, 12, 1], [0, 14, 0, 0]


def inputs_of(dtype, tokens=14, experts=4, width=8, inner=8):
    probs = torch.rand(tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    return [
        normal(tokens, width, dtype=dtype),
        normal(experts, 2 * inner, width, dtype=dtype, seed=1),
        normal(experts, width, inner, dtype=dtype, seed=2),
        probs.to(torch.float32 if dtype == torch.bfloat16 else dtype),
    ]


def slow(counts, activation=situ_glu):
    def run(x, gate_up, down, probs):
        gate, up = reference.grouped_linear(x, gate_up, counts).chunk(2, -1)
        return [reference.grouped_linear(activation(gate, up, scale=probs), down, counts)]

    return run


def takes(name, dtype, counts) -> bool:
    if name == "grouped product":
        return dtype != torch.float64
    return name != "padded batch" or 4 * max(counts) <= 2 * sum(counts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [EVEN, ZEROS, SKEWED, ALL_IN_ONE])
@pytest.mark.parametrize("name", [*NAMES, None])
def test_equals_the_loop(dtype, counts, name):
    loads = torch.tensor(counts)

    def fast(x, gate_up, down, probs):
        return [grouped_mlp(x, loads, gate_up, down, situ_glu, probs, backend=name)]

    if name is not None and not takes(name, dtype, counts):
        with pytest.raises(ValueError, match=f"{name} refused"):
            fast(*inputs_of(dtype))
        return
    same_with_gradients(fast, slow(loads), inputs_of(dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_token_at_all(dtype):
    x, gate_up, down, probs = (t.requires_grad_() for t in inputs_of(dtype, tokens=0))
    out = grouped_mlp(x, torch.zeros(4, dtype=torch.int64), gate_up, down, situ_glu, probs)
    grads = torch.autograd.grad(out.sum(), (x, gate_up, down, probs))
    assert out.shape == (0, 8) and not grads[1].any() and not grads[2].any()
    assert [g.shape for g in grads] == [x.shape, gate_up.shape, down.shape, probs.shape]


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_without_tokens_have_zero_gradients_in_fresh_memory(dtype):
    torch.use_deterministic_algorithms(True, warn_only=True)  # fresh memory then holds NaN
    try:
        x, gate_up, down, probs = (t.requires_grad_() for t in inputs_of(dtype))
        assert torch.empty(3).isnan().all()
        out = grouped_mlp(x, torch.tensor(ZEROS), gate_up, down, situ_glu, probs)
        d_gate_up, d_down = torch.autograd.grad(out.sum(), (gate_up, down))
    finally:
        torch.use_deterministic_algorithms(False)
    assert not d_gate_up[1].any() and not d_down[1].any()
    assert torch.isfinite(d_gate_up).all() and torch.isfinite(d_down).all() and d_down[0].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_widths_that_do_not_fill_16_bytes(dtype):
    loads = torch.tensor(EVEN)
    same_with_gradients(
        lambda x, gate_up, down, probs: [grouped_mlp(x, loads, gate_up, down, swiglu, probs)],
        slow(loads, swiglu), inputs_of(dtype, width=7, inner=5), dtype,
    )  # fmt: skip


def test_scattered_inputs_and_an_expanded_gradient():
    x, gate_up, down, probs = inputs_of(torch.float32)
    x, loads = torch.cat([x, x], 1)[:, :8], torch.tensor(EVEN)
    leaves = [t.clone().requires_grad_() if i else t.requires_grad_() for i, t in enumerate((x, gate_up, down, probs))]
    grads = torch.autograd.grad(grouped_mlp(leaves[0], loads, *leaves[1:3], situ_glu, leaves[3]).sum(), leaves)
    other = torch.autograd.grad(slow(loads)(*leaves)[0].sum(), leaves)
    for a, b in zip(grads, other):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_probabilities_weigh_each_token_and_none_weighs_by_one():
    x, gate_up, down, probs = inputs_of(torch.float64)
    loads = torch.tensor(EVEN)
    plain = grouped_mlp(x, loads, gate_up, down, situ_glu, None)
    torch.testing.assert_close(grouped_mlp(x, loads, gate_up, down, situ_glu, probs), probs.unsqueeze(1) * plain)


def test_gradcheck():
    x, gate_up, down, probs = (t.requires_grad_() for t in inputs_of(torch.float64, tokens=6, width=3, inner=2))
    loads = torch.tensor([2, 0, 3, 1])
    assert torch.autograd.gradcheck(
        lambda x, gate_up, down, probs: grouped_mlp(x, loads, gate_up, down, situ_glu, probs), (x, gate_up, down, probs)
    )


def test_the_choice_of_path():
    def chosen(dtype, counts, **sizes):
        x, gate_up, down, _ = inputs_of(dtype, **sizes)
        return next(b.name for b in BACKENDS if b.refuses(x, torch.tensor(counts), gate_up, down) is None)

    assert chosen(torch.float32, SKEWED) == chosen(torch.bfloat16, SKEWED) == "grouped product"
    assert chosen(torch.float64, EVEN) == chosen(torch.float32, EVEN, width=7) == "padded batch"
    assert chosen(torch.float64, SKEWED) == "one expert at a time"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"counts": torch.tensor([1, 2, 3, 4])}, "counts sum to 10, x has 14 tokens"),
        ({"counts": torch.tensor(EVEN, dtype=torch.int32)}, "torch.int32; give int64"),
        ({"counts": torch.tensor([7, 7])}, "do not fit"),
        ({"down": torch.zeros(4, 8, 7)}, "do not fit"),
        ({"down": torch.zeros(4, 8, 8, dtype=torch.float64)}, "give all three one dtype"),
        ({"probs": torch.zeros(4)}, r"probs \(4,\)"),
    ],
)
def test_wrong_arguments_are_named(change, words):
    x, gate_up, down, probs = inputs_of(torch.float32)
    arguments = {"counts": torch.tensor(EVEN), "gate_up": gate_up, "down": down, "probs": probs} | change
    with pytest.raises(ValueError, match=words):
        grouped_mlp(x, arguments["counts"], arguments["gate_up"], arguments["down"], situ_glu, arguments["probs"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_token_s_result_does_not_depend_on_its_company(dtype: torch.dtype) -> None:
    """Bitwise: otherwise later tokens, by choosing the same expert, would change the rounding of earlier ones."""
    torch.manual_seed(0)
    counts = torch.tensor([40, 17, 64])
    x = torch.randn(121, 32, dtype=dtype)
    gate_up, down = torch.randn(3, 48, 32, dtype=dtype), torch.randn(3, 32, 24, dtype=dtype)
    whole = grouped_mlp(x, counts, gate_up, down, swiglu, None).split(counts.tolist())
    for fewer in ([1, 2, 3], [5, 0, 11], [23, 16, 33]):
        part = torch.cat([piece[:n] for piece, n in zip(x.split(counts.tolist()), fewer)])
        got = grouped_mlp(part, torch.tensor(fewer), gate_up, down, swiglu, None).split(fewer)
        for a, b, n in zip(got, whole, fewer):
            assert torch.equal(a, b[:n])
