"""MX formats against torchao and against the definition, ties and edges included."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from kernels import mx
from kernels.mx import library, rounding
from tests.k3 import te_standin

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
GRID = {"mxfp4": E2M1, "mxfp8": E4M3}
MODES = {"rceil": ScaleCalculationMode.RCEIL, "floor": ScaleCalculationMode.FLOOR}


def _numbers(rows: int, cols: int = 64, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(rows, cols, generator=gen) * torch.exp2(torch.randint(-30, 30, (rows, 1), generator=gen).float())


@pytest.mark.parametrize("rule", mx.RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", mx.FORMATS)
def test_equals_torchao(format: str, dtype: torch.dtype, rule: str) -> None:
    x = _numbers(256).to(dtype)
    element = torch.float8_e4m3fn if format == "mxfp8" else torch.float4_e2m1fn_x2
    scales, data = to_mx(x, element, 32, MODES[rule])
    codes, got = mx.quantise(x, format, rule)
    assert torch.equal(got, scales.view(torch.uint8).view_as(got))
    want = data.view(torch.uint8)
    assert torch.equal(mx.pack_mxfp4(codes) if format == "mxfp4" else codes, want.view(256, -1))


def _all_exponents(dtype: torch.dtype) -> torch.Tensor:
    """[N, 32]: a block for every power of two that float32 has, denormal ones included, and for leading numbers beside the edges
    at which scales change; elements are multiples of 1/64, many of them ties; zeros of both signs, and blocks of zeros.
    """
    gen = torch.Generator().manual_seed(0)
    powers = torch.exp2(torch.arange(-149, 128).double()).view(-1, 1, 1)
    leading = torch.tensor([1, 1.25, 1.5, 1.5 + 2**-7, 1.75, 1.75 + 2**-7, 2 - 2**-7], dtype=torch.float64).view(1, -1, 1)
    x = torch.randint(-64, 65, (277, 7, 32), generator=gen).double() / 64
    x[..., 0], x[..., 1], x[..., 2] = 1, 0.0, -0.0
    x = torch.cat([(x * leading * powers).view(-1, 32), torch.zeros(1, 32).double(), -torch.zeros(1, 32).double()])
    largest = torch.finfo(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32).max
    return x.clamp(-largest, largest).to(dtype)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[x.element_size()])


@pytest.mark.parametrize("rule", mx.RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", mx.FORMATS)
def test_equals_torchao_over_all_exponents(format: str, dtype: torch.dtype, rule: str) -> None:
    x = _all_exponents(dtype)
    element = torch.float8_e4m3fn if format == "mxfp8" else torch.float4_e2m1fn_x2
    scales, data = to_mx(x, element, 32, MODES[rule])
    codes, got = mx.quantise(x, format, rule)
    assert torch.equal(got, scales.view(torch.uint8).view_as(got))
    # torchao divides by 2^-126 where the code says 2^-127: it has no denormal scales
    there = got.flatten() > 0
    want, ours = data.view(torch.uint8).view(len(x), -1), mx.pack_mxfp4(codes) if format == "mxfp4" else codes
    assert torch.equal(ours[there], want[there]) and 0.85 < there.float().mean() < 1


@pytest.mark.parametrize("rule", mx.RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("format", mx.FORMATS)
def test_rounding_in_place_is_codes_and_back(format: str, dtype: torch.dtype, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, in stretches of a block and of many: where a stretch has numbers near the ends it is left to the other."""
    normal = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).double()
    normal[3, ::2], normal[5], normal[7, 1:] = 0, -0.0, 1e-300
    inside = (_numbers(300).double(), normal, normal * torch.exp2(torch.arange(-64, 64, 2).double()).view(-1, 1))
    damaged = normal.clone()
    damaged[0, 3], damaged[1, 5], damaged[2, 7] = torch.nan, torch.inf, -torch.inf
    for x in (*(t.to(dtype) for t in inside), _all_exponents(dtype), damaged.to(dtype)):
        want = mx.round_trip(x, format, rule, backend="codes and back")
        for stretch in (32, 96, 1 << 17):
            monkeypatch.setattr(rounding, "STRETCH", stretch)
            got = mx.round_trip(x, format, rule, backend="rounding in place")
            finite = ~want.isnan()
            assert torch.equal(got.isnan(), ~finite) and torch.equal(_bits(got)[finite], _bits(want)[finite])
    strided = normal.to(dtype).t().contiguous().t()
    assert torch.equal(mx.round_trip(strided, format, rule), mx.round_trip(normal.to(dtype), format, rule))
    assert mx.round_trip(normal.to(dtype)[:0], format, rule).shape == (0, 32)


def test_plain_numbers_are_not_left_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.cat([_numbers(64), torch.zeros(2, 64)])
    monkeypatch.setattr(rounding, "in_steps", lambda *_: pytest.fail("these numbers have nothing special"))
    mx.round_trip(x, "mxfp4", backend="rounding in place")


@given(seed=st.integers(0, 2**20), shift=st.integers(-140, 120))
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("rule", mx.RULES)
@pytest.mark.parametrize("format", mx.FORMATS)
def test_elements_are_the_nearest_ones(format: str, rule: str, seed: int, shift: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    # multiples of 1/16 have many exact ties
    x = (torch.randint(-160, 161, (2, 32), generator=gen).double() / 16) * 2.0**shift
    codes, scales = mx.quantise(x, format, rule)
    scale = 2.0 ** (scales.double() - 127)
    size = (x / scale.view(2, 1)).abs().clamp(max=float(GRID[format][-1]))
    distance = (size.unsqueeze(-1) - GRID[format]).abs()
    near = distance == distance.amin(-1, keepdim=True)
    even = near & (torch.arange(len(GRID[format])) % 2 == 0)
    want = torch.where(near.sum(-1) > 1, even.int().argmax(-1), near.int().argmax(-1))
    assert torch.equal((codes & (7 if format == "mxfp4" else 127)).long(), want)


@pytest.mark.parametrize("format", mx.FORMATS)
def test_scale_rules(format: str) -> None:
    largest = {"mxfp4": 6.0, "mxfp8": 448.0}[format]
    x = torch.zeros(4, 32, dtype=torch.float64)
    x[0, 0], x[1, 0], x[2, 0] = largest, largest * (1 + 2**-40), 2.0
    _, scales = mx.quantise(x, format, "rceil")
    top = int(torch.tensor(largest).log2().floor())
    assert scales.flatten().tolist() == [127, 128, 127 + 1 - top, 0]
    _, scales = mx.quantise(x, format, "floor")
    assert scales.flatten().tolist() == [127, 127, 127 + 1 - top, 0]


def test_float64_is_not_rounded_twice() -> None:
    # just above the middle of 1 and 1.125: float32 would first round it onto the tie, and the tie goes down to 1
    x = torch.zeros(1, 32, dtype=torch.float64)
    x[0, 0], x[0, 1] = 448.0, 1.0625 + 2.0**-40
    assert float(mx.fake_quantise(x, "mxfp8")[0, 1]) == 1.125


def test_floor_saturates_and_rceil_does_not() -> None:
    x = torch.full((1, 32), 7.5)
    assert mx.fake_quantise(x, "mxfp4", "floor").unique().item() == 6.0
    assert mx.fake_quantise(x, "mxfp4", "rceil").unique().item() == 8.0


@pytest.mark.parametrize("rule", mx.RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("format", mx.FORMATS)
def test_numbers_on_the_grid_survive(format: str, dtype: torch.dtype, rule: str) -> None:
    once = mx.fake_quantise(_numbers(64).to(dtype), format, rule)
    assert once.dtype == dtype
    assert torch.equal(mx.fake_quantise(once, format, rule), once)


@given(seed=st.integers(0, 2**20))
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("format", ["mxfp4"])
def test_codes_come_back_bit_for_bit_with_the_scales_they_had(format: str, dtype: torch.dtype, seed: int) -> None:
    """Any codes under any scales: blocks of zeros of both signs, and blocks that fit under smaller scales, included."""
    gen = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (64, 4, 32), generator=gen, dtype=torch.uint8)
    most = torch.randint(0, 8, (64, 4, 1), generator=gen, dtype=torch.uint8)
    codes = ((codes & 8) | torch.minimum(codes & 7, most)).view(64, 128)
    scales = torch.randint(0, 252, (64, 4), generator=gen, dtype=torch.uint8)
    x = mx.dequantise(codes, scales, format, dtype)
    got = mx.requantise(x, format, scales)
    assert torch.equal(got[0], codes) and torch.equal(got[1], scales)
    alone = mx.requantise(x, format)
    assert not torch.equal(alone[1], scales), "values do not tell their scales"
    assert torch.equal(mx.dequantise(*alone, format, dtype), x)
    # a scale that would change a value is not kept
    coarse = mx.requantise(x, format, scales + 3)
    assert torch.equal(mx.dequantise(*coarse, format, dtype), x)


@pytest.mark.parametrize("format", mx.FORMATS)
def test_a_block_with_nan_or_infinity_is_nan(format: str) -> None:
    x = torch.ones(3, 32)
    x[0, 3], x[1, 5] = torch.nan, torch.inf
    codes, scales = mx.quantise(x, format)
    assert scales.flatten().tolist()[:2] == [255, 255]
    out = mx.dequantise(codes, scales, format)
    assert out[:2].isnan().all() and torch.equal(out[2], x[2])


def test_gradient_passes_straight_through() -> None:
    x = _numbers(4).requires_grad_()
    up = torch.randn(4, 64)
    mx.fake_quantise(x, "mxfp4").backward(up)
    assert torch.equal(x.grad, up)


def test_pack_puts_the_even_column_low() -> None:
    codes = torch.tensor([[1, 15, 0, 7]], dtype=torch.uint8)
    assert mx.pack_mxfp4(codes).tolist() == [[0xF1, 0x70]]
    assert torch.equal(mx.unpack_mxfp4(mx.pack_mxfp4(codes)), codes)


@pytest.mark.parametrize("rows", [0, 1, 31, 32, 33, 44])
def test_the_library_gets_whole_grids(rows: int) -> None:
    """By the stand-in, which refuses others and rounds as we do."""
    x = _numbers(44)[:rows]
    with te_standin.installed() as record:
        got = library.rounded(x.view(rows, 1, 64), "mxfp8", "rceil")
    assert got.shape == (rows, 1, 64) and torch.equal(got.view(rows, 64), mx.round_trip(x, "mxfp8"))
    assert record.quantised == ([(rows + -rows % 32, 64)] if rows else [])


def test_the_library_says_why_it_is_not_taken() -> None:
    x = torch.zeros(1, 32)
    assert library.refuses(x, "mxfp8", "rceil") == "the tensor is on cpu"
    with pytest.raises(ValueError, match="Transformer Engine refused: the tensor is on cpu"):
        mx.round_trip(x, "mxfp8", backend="Transformer Engine")


def test_errors_name_the_fix() -> None:
    with pytest.raises(ValueError, match=r"kept scales of shape \(3,\) do not fit \(2, 64\): one per 32"):
        mx.requantise(torch.zeros(2, 64), "mxfp4", torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="multiple of 32"):
        mx.quantise(torch.zeros(2, 33), "mxfp4")
    with pytest.raises(ValueError, match="one of mxfp4, mxfp8"):
        mx.quantise(torch.zeros(2, 32), "mxfp6")
    with pytest.raises(ValueError, match="one of rceil, floor"):
        mx.quantise(torch.zeros(2, 32), "mxfp4", "round")
    with pytest.raises(ValueError, match="one per 32"):
        mx.dequantise(torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8), "mxfp4")
    with pytest.raises(ValueError, match="even last axis"):
        mx.pack_mxfp4(torch.zeros(3, dtype=torch.uint8))
