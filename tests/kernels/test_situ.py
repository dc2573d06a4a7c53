import pytest
import torch

from kernels import fastmath
from kernels.situ import fused, reference, situ_glu, swiglu
from tests.kernels.operators import DTYPES, close, normal, same_with_gradients

UNITS = {
    "situ": (situ_glu, lambda gate, up, scale: reference.situ_glu(gate, up, beta=4.0, linear_beta=25.0, scale=scale)),
    "swiglu": (swiglu, lambda gate, up, scale: reference.swiglu(gate, up, scale=scale)),
}


@pytest.fixture(params=[1 << 16, 10], ids=["one block", "many blocks"])
def block_size(request, monkeypatch):
    monkeypatch.setattr(fused, "CPU_ELEMENTS", request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", UNITS)
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("shape", [(0, 6), (7, 6), (3, 5, 6)])
def test_equals_the_reference_on_halves_of_one_tensor(dtype, name, scaled, shape, block_size):
    fast, slow = UNITS[name]
    both = 5 * normal(*shape[:-1], 2 * shape[-1], dtype=dtype)
    scale = normal(*shape[:-1], dtype=torch.float32 if dtype == torch.bfloat16 else dtype, seed=1)
    same_with_gradients(
        lambda h, *s: [fast(*h.chunk(2, -1), scale=s[0] if s else None)],
        lambda h, *s: [slow(*h.chunk(2, -1), s[0] if s else None)],
        [both, scale] if scaled else [both], dtype,
    )  # fmt: skip


def test_scattered_memory():
    gate, up = normal(6, 7, dtype=torch.float64).t(), normal(7, 12, dtype=torch.float64, seed=1)[:, ::2]
    same_with_gradients(
        lambda a, b: [situ_glu(a, b)], lambda a, b: [situ_glu(a.contiguous(), b.contiguous())], [gate, up], torch.float64
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bounds(dtype):
    gate = torch.cat([torch.linspace(-60, 60, 100_001, dtype=dtype), torch.tensor([-1e30, 1e30], dtype=dtype)])
    one = torch.full_like(gate, 1e30)  # the up branch at its limit, 25
    out = situ_glu(gate, one)
    assert out.abs().max() <= 100 and situ_glu(gate[:50_000], -one[:50_000]).abs().max() <= 100
    factor = out / 25
    assert factor.min() > -0.270 and factor.max() <= 4
    assert (situ_glu(torch.tensor([30.0]), torch.tensor([100.0])).abs() < 100).all()


def test_equals_swiglu_near_zero_and_for_large_betas():
    small_gate, small_up = 1e-3 * normal(1000, dtype=torch.float64), 1e-3 * normal(1000, dtype=torch.float64, seed=1)
    gate, up = normal(1000, dtype=torch.float64), normal(1000, dtype=torch.float64, seed=1)
    torch.testing.assert_close(situ_glu(small_gate, small_up), swiglu(small_gate, small_up), rtol=1e-5, atol=0)
    torch.testing.assert_close(situ_glu(gate, up, beta=1e6, linear_beta=1e6), swiglu(gate, up), rtol=1e-10, atol=0)
    assert (situ_glu(gate, up) - swiglu(gate, up)).abs().max() > 1e-2


def test_float32_is_right_to_its_last_digits_near_zero():
    gate, up = (10.0 ** torch.linspace(-30, 0, 500) for _ in range(2))
    exact = situ_glu(gate.double(), up.double())
    normal_range = exact > 1e-37
    relative = ((situ_glu(gate, up).double() - exact) / exact)[normal_range]
    assert relative.abs().max() < 1e-6


@pytest.mark.parametrize(("fast", "largest"), [(situ_glu, 1e30), (swiglu, 1e15)])
def test_extreme_values_give_finite_gradients(fast, largest):
    values = torch.tensor([-largest, -100.0, -0.0, 1e-38, 80.0, largest])
    gate, up = (t.clone().requires_grad_() for t in torch.meshgrid(values, values, indexing="ij"))
    out = fast(gate, up)
    assert all(torch.isfinite(t).all() for t in (out, *torch.autograd.grad(out.sum(), (gate, up))))


def test_the_gradient_vanishes_at_the_one_minimum_of_the_gate_only():
    gate = torch.linspace(-20, 20, 1001, dtype=torch.float64, requires_grad=True)
    up = torch.full_like(gate, 30.0, requires_grad=True)
    d_gate, d_up = torch.autograd.grad(situ_glu(gate, up).sum(), (gate, up))
    rising = d_gate > 0
    turn = int(rising.nonzero()[0])
    assert rising[turn:].all() and (d_gate[:turn] < 0).all() and -1.3 < gate[turn] < -1.0
    assert ((d_up > 0) == (gate > 0))[gate.abs() > 1e-9].all() and (d_up.abs() > 0).sum() >= 1000  # zero at gate = 0 alone


@pytest.mark.parametrize("fast", [situ_glu, swiglu])
def test_gradcheck_and_memory(fast):
    gate, up, scale = (normal(*s, dtype=torch.float64, seed=i).requires_grad_() for i, s in enumerate([(4, 3), (4, 3), (4,)]))
    assert torch.autograd.gradcheck(lambda a, b, s: fast(a, b, scale=s), (gate, up, scale))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        fast(gate, up, scale=scale)
    assert set(kept) == {gate.data_ptr(), up.data_ptr(), scale.data_ptr()}


@pytest.mark.parametrize("name", ["exp_", "tanh_"])
def test_fast_functions_equal_torch(name, monkeypatch):
    function = getattr(fastmath, name)
    values = torch.cat([torch.linspace(-110, 20, 1001), torch.tensor([0.0, 1e-30, -torch.inf, torch.inf, torch.nan])])
    for x in (values, values.double(), values.repeat(2).view(-1, 2)[:, 0]):
        quick = function(x.clone())
        with monkeypatch.context() as patch:
            patch.setattr(fastmath, "numpy", None)
            plain = function(x.clone())
        torch.testing.assert_close(quick, plain, rtol=4e-7 if x.dtype == torch.float32 else 1e-14, atol=1e-37, equal_nan=True)
    half = normal(8, dtype=torch.bfloat16)
    assert torch.equal(function(half.clone()), getattr(half.clone(), name)())


def test_wrong_arguments_are_named():
    x = torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"beta=0\b.*positive"):
        situ_glu(x, x, beta=0)
    with pytest.raises(ValueError, match="give both one dtype and shape"):
        situ_glu(x, x.double())
    with pytest.raises(ValueError, match=r"scale has shape \(4,\)"):
        swiglu(x, x, scale=torch.zeros(4))
    close(swiglu(x, x, scale=torch.zeros(3)), x, torch.float32)
