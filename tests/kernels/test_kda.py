"""KDA: the chunked form is the recurrence, to the last gradient, and keeps its promises at the edges."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import dispatch
from kernels.kda import fla, kda, layout, tiles
from kernels.kda.gate import log_decay, log_decay_backward
from kernels.kda.inverse import unit_lower_inverse

NAMES = ("q", "k", "v", "z", "beta_logit", "A_log", "dt_bias")
F32, F64 = torch.float32, torch.float64


def draw(
    batch: int, length: int, heads: int, key: int, value: int, *, seed: int = 0, state: bool = False, dtype=F64
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=F64)

    made = {
        "q": normal(batch, length, heads, key),
        "k": normal(batch, length, heads, key),
        "v": normal(batch, length, heads, value),
    }
    made |= {"z": 3 * normal(batch, length, heads, key), "beta_logit": normal(batch, length, heads)}
    made |= {"A_log": 0.3 * normal(heads), "dt_bias": normal(heads, key)}
    if state:
        made["initial_state"] = normal(batch, heads, key, value)
    return {n: t.to(dtype) for n, t in made.items()}


def run(inputs: dict[str, Tensor], *, seed: int = 1, scale: float = 1.0, **options) -> dict[str, Tensor]:
    """out, final_state, and the gradients of every input for a random d_out and d_final_state."""
    leaves = {n: t.detach().clone().requires_grad_() for n, t in inputs.items()}
    out, final = kda(**leaves, **options)
    generator = torch.Generator().manual_seed(seed)
    d_out = scale * torch.randn(out.shape, generator=generator, dtype=F64)
    d_final = scale * torch.randn(final.shape, generator=generator, dtype=F64)
    torch.autograd.backward([out, final], [d_out.to(out.dtype), d_final.to(final.dtype)])
    return {"out": out.detach(), "final_state": final.detach()} | {f"d_{n}": t.grad for n, t in leaves.items()}


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    """Norm-relative agreement of every tensor; one that is zero by its nature is compared with the size of the others."""
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].shape == want[name].shape, name
        assert torch.isfinite(got[name]).all(), name
        error = (got[name].double() - want[name].double()).norm().item()
        assert error <= tolerance * (want[name].double().norm().item() + 1.0), f"{name}: {error:.2e}"


def starts_of(batch: int, length: int, *firsts: tuple[int, int]) -> Tensor:
    starts = torch.zeros(batch, length, dtype=torch.bool)
    for row, position in firsts:
        starts[row, position] = True
    return starts


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
@pytest.mark.parametrize("length", [1, 2, 5, 15, 16, 17, 32, 63, 64, 65, 131, 200])
def test_chunked_is_the_recurrence_at_every_length(length: int, gate: str) -> None:
    inputs = draw(2, length, 3, 16, 24, state=True)
    assert_close(run(inputs, gate=gate, backend="chunked"), run(inputs, gate=gate, backend="recurrent"), 1e-12)


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 3), length=st.integers(1, 150), heads=st.integers(1, 3), key=st.sampled_from([1, 4, 16, 33]),
    value=st.sampled_from([1, 8, 20]), bound=st.sampled_from([-5.0, -3.3, -0.1]), gate=st.sampled_from(["bounded", "softplus"]),
    shift=st.sampled_from([-8.0, 0.0, 40.0]), documents=st.sampled_from([0.0, 0.02, 0.3, 1.0, None]), state=st.booleans(),
    seed=st.integers(0, 9999),
)  # fmt: skip
def test_chunked_is_the_recurrence_anywhere(batch, length, heads, key, value, bound, gate, shift, documents, state, seed) -> None:
    inputs = draw(batch, length, heads, key, value, seed=seed, state=state)
    inputs["z"] = inputs["z"] + shift  # mild decay, mixed, at the floor
    starts = None if documents is None else torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)) < documents
    options = {"gate": gate, "lower_bound": bound, "document_starts": starts}
    assert_close(run(inputs, backend="chunked", **options), run(inputs, backend="recurrent", **options), 1e-11)


def test_the_recurrence_and_the_chunks_agree_with_an_independent_one() -> None:
    naive = pytest.importorskip("fla.ops.kda.naive")
    from kernels.kda.bench import naive as adapted

    inputs = draw(2, 128, 2, 16, 16, dtype=F32)
    want, state = adapted(naive.naive_chunk_kda)(*inputs.values())
    for backend in ("recurrent", "chunked"):
        out, final = kda(**inputs, backend=backend)
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(final, state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e9])
def test_gradients_at_the_floor_are_finite_and_right_in_float32(scale: float) -> None:
    inputs = draw(1, 200, 2, 32, 32, state=True)
    inputs["z"][:, 40:] = 12.0  # long runs at the floor: sigmoid is within 1e-5 of 1
    inputs["z"][:, :, :, ::3] = -6.0  # beside channels that hardly decay
    want = run(inputs, scale=scale, backend="recurrent")
    got = run({n: t.float() for n, t in inputs.items()}, scale=scale, backend="chunked")
    for name in want:
        error = (got[name].double() - want[name]).norm() / want[name].norm()
        assert error < 1e-4, f"{name}: {error:.1e}"


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
@pytest.mark.parametrize("backend", ["recurrent", "chunked"])
@pytest.mark.parametrize("logit", [-1e30, -1e4, 1e4, 1e30])
def test_saturated_gates_give_finite_gradients(logit: float, backend: str, gate: str) -> None:
    inputs = draw(1, 70, 2, 16, 16, dtype=F32)
    inputs["z"][:, ::2] = logit
    inputs["A_log"][0] = 20.0
    got = run(inputs, gate=gate, backend=backend)
    assert all(torch.isfinite(t).all() for t in got.values())
    assert got["d_z"][:, ::2].abs().max() < 1e-6


def test_the_gate_keeps_its_derivative_near_the_floor() -> None:
    z = torch.tensor([4.0, 10.0, 14.0, 17.0, 60.0])
    one, zero = torch.ones(()), torch.zeros(())
    exact = z.double().requires_grad_()
    (log_decay(-exact, one.double(), zero.double(), gate="bounded", lower_bound=-5.0) * -1).sum().backward()  # by symmetry
    g = log_decay(z, one, zero, gate="bounded", lower_bound=-5.0)
    dz, d_log_rate = log_decay_backward(torch.ones_like(z), g, z, one, zero, gate="bounded")
    torch.testing.assert_close(dz.double(), -exact.grad.abs(), rtol=1e-5, atol=0)
    torch.testing.assert_close(d_log_rate, z * dz)


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_later_tokens_leave_earlier_outputs_bitwise_unchanged(gate: str) -> None:
    inputs = draw(2, 150, 2, 32, 32, state=True, dtype=F32)
    other = draw(2, 150, 2, 32, 32, seed=5, dtype=F32)
    starts = starts_of(2, 150, (0, 20), (1, 64))
    first, _ = kda(**inputs, gate=gate, document_starts=starts, backend="chunked")
    for position in (1, 7, 15, 16, 21, 31, 33, 47, 63, 64, 65, 100, 149):
        changed = dict(inputs)
        for name in ("q", "k", "v", "z", "beta_logit"):
            changed[name] = torch.cat([inputs[name][:, :position], 7 * other[name][:, position:]], 1)
        maps = starts.clone()
        maps[:, position:] = torch.rand(2, 150 - position) < 0.1
        second, _ = kda(**changed, gate=gate, document_starts=maps, backend="chunked")
        assert torch.equal(first[:, :position], second[:, :position]), position
        assert not torch.equal(first[:, position:], second[:, position:])


def test_a_map_without_inner_starts_is_bitwise_the_batch_without_a_map() -> None:
    inputs = draw(2, 90, 2, 16, 16, dtype=F32)
    plain = kda(**inputs)
    mapped = kda(**inputs, document_starts=starts_of(2, 90, (0, 0), (1, 0)))
    assert all(torch.equal(a, b) for a, b in zip(plain, mapped))


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_packed_documents_equal_the_documents_alone(gate: str) -> None:
    bounds = [0, 1, 2, 16, 40, 64, 65, 127, 131]
    inputs = draw(1, 131, 2, 16, 16)
    packed = run(inputs, gate=gate, document_starts=starts_of(1, 131, *((0, b) for b in bounds[:-1])), backend="chunked")
    leaves = {n: t.clone().requires_grad_() for n, t in inputs.items()}
    parts = []
    for first, last in pairwise(bounds):
        cut = {n: t if n in ("A_log", "dt_bias") else t[:, first:last] for n, t in leaves.items()}
        parts.append(kda(**cut, gate=gate, backend="chunked"))
    out, final = torch.cat([o for o, _ in parts], 1), parts[-1][1]
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(t.shape, generator=generator, dtype=F64) for t in (out, final)]
    torch.autograd.backward([out, final], gradients)
    alone = {"out": out.detach(), "final_state": final.detach()} | {f"d_{n}": t.grad for n, t in leaves.items()}
    assert_close(packed, alone, 1e-12)


@pytest.mark.parametrize("cut", [1, 50, 64, 100])
@pytest.mark.parametrize("mapped", [False, True])
def test_a_sequence_in_two_parts_is_the_whole(cut: int, mapped: bool) -> None:
    inputs = draw(2, 131, 2, 16, 24, state=True)
    starts = starts_of(2, 131, (0, 0), (1, 30), (0, 70), (1, 120)) if mapped else None
    whole = run(inputs, document_starts=starts)
    leaves = {n: t.clone().requires_grad_() for n, t in inputs.items()}
    halves, state = [], leaves["initial_state"]
    for part in (slice(0, cut), slice(cut, None)):
        given = {n: leaves[n] if n in ("A_log", "dt_bias") else leaves[n][:, part] for n in NAMES}
        out, state = kda(
            **given, initial_state=state, document_starts=None if starts is None else starts[:, part], backend="chunked"
        )
        halves.append(out)
    out = torch.cat(halves, 1)
    generator = torch.Generator().manual_seed(1)
    torch.autograd.backward([out, state], [torch.randn(t.shape, generator=generator, dtype=F64) for t in (out, state)])
    assert_close(
        {"out": out.detach(), "final_state": state.detach()} | {f"d_{n}": t.grad for n, t in leaves.items()}, whole, 1e-12
    )


def test_softplus_never_takes_the_dense_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args):
        raise AssertionError("dense tiles")

    monkeypatch.setattr(tiles, "Dense", refuse)
    inputs = draw(1, 70, 1, 8, 8)
    inputs["z"][:, ::5] = 300.0  # one step forgets everything: a factored tile would overflow
    assert_close(run(inputs, gate="softplus", backend="chunked"), run(inputs, gate="softplus", backend="recurrent"), 1e-10)
    with pytest.raises(AssertionError, match="dense tiles"):
        kda(**inputs)


def test_softplus_keeps_its_precision_after_strong_decay_in_float32() -> None:
    inputs = draw(1, 130, 2, 16, 16)
    inputs["z"] = inputs["z"] - 4
    inputs["z"][:, ::8] = 60.0
    want = run(inputs, gate="softplus", backend="recurrent")
    assert_close(run({n: t.float() for n, t in inputs.items()}, gate="softplus", backend="chunked"), want, 3e-5)


@pytest.mark.parametrize(
    ("gate", "bias", "limit"),
    [("bounded", -3.0, 6e-7), ("bounded", 0.0, 1.5e-6), ("bounded", 2.0, 2e-6), ("softplus", 0.0, 6e-7), ("softplus", 2.0, 6e-7)],
)
def test_gradients_of_the_decay_lose_no_digits_in_float32(gate: str, bias: float, limit: float) -> None:
    """Summed over the chunk as q dq + k dk_row - k dk_column, d_dt_bias would be 2, 13, 80, 5 and 26 times the limit."""
    single = draw(2, 150, 16, 16, 16, dtype=F32)
    single["z"], single["dt_bias"] = 0.1 * single["z"], 0.5 * single["dt_bias"] + bias
    want = run({n: t.double() for n, t in single.items()}, gate=gate, backend="recurrent")
    got = run(single, gate=gate, backend="chunked")
    errors = {n: ((got[n].double() - t).norm() / t.norm()).item() for n, t in want.items()}
    assert max(errors.values()) < limit, errors


def test_strides_do_not_matter() -> None:
    inputs = draw(2, 70, 3, 16, 16, state=True, dtype=F32)
    views = {n: t.transpose(0, 1).contiguous().transpose(0, 1) for n, t in inputs.items() if t.dim() > 2}
    views["v"] = torch.stack([inputs["v"]] * 2, -1)[..., 0]
    views["k"] = inputs["k"].permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)
    assert not views["q"].is_contiguous() and not views["v"].is_contiguous()
    for a, b in zip(kda(**inputs), kda(**(inputs | views))):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_the_grouping_of_chunks_changes_nothing(gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw(2, 300, 2, 16, 16, state=True)
    starts = starts_of(2, 300, (0, 100), (1, 255))
    whole = run(inputs, gate=gate, document_starts=starts)
    monkeypatch.setattr(layout, "CPU_BLOCK", 1)
    assert len(layout.Layout.of(inputs["q"], inputs["v"], 64).groups()) == 5
    assert_close(run(inputs, gate=gate, document_starts=starts), whole, 1e-13)


@pytest.mark.parametrize("backend", ["recurrent", "chunked"])
def test_bf16_is_finite_and_near(backend: str) -> None:
    rounded = {n: t.to(torch.bfloat16) for n, t in draw(2, 131, 2, 32, 32).items()}
    given = {n: t.float() if n in ("A_log", "dt_bias") else t for n, t in rounded.items()}
    got = run(given, backend=backend)
    want = run({n: t.float() for n, t in rounded.items()}, backend="recurrent")
    assert got["out"].dtype == got["d_q"].dtype == got["d_z"].dtype == torch.bfloat16
    assert got["final_state"].dtype == got["d_A_log"].dtype == F32
    assert_close(got, want, 1e-2)


@pytest.mark.parametrize("backend", ["recurrent", "chunked"])
def test_equal_keys_lose_no_digits(backend: str) -> None:
    inputs = draw(1, 130, 1, 16, 16)
    inputs["k"][:] = inputs["k"][:, :1]
    inputs["beta_logit"][:], inputs["z"][:] = 8.0, -20.0
    want = run(inputs, backend="recurrent")
    got = run({n: t.float() for n, t in inputs.items()}, backend=backend)
    for name in ("out", "final_state", "d_q", "d_v"):
        assert (got[name].double() - want[name]).norm() / want[name].norm() < 2e-5, name


def test_the_inverse_is_exact_for_ones() -> None:
    lower = torch.ones(3, 64, 64).tril(-1)
    want = torch.eye(64) - torch.eye(64).roll(1, 0).tril(-1)
    assert torch.equal(unit_lower_inverse(lower)[1], want)


@pytest.mark.parametrize("used", ["out", "final_state"])
@pytest.mark.parametrize("wanted", [("k",), ("v", "A_log"), ("z", "initial_state")])
def test_parts_of_the_gradient(used: str, wanted: tuple[str, ...]) -> None:
    inputs = draw(1, 70, 2, 8, 8, state=True)
    gradients = []
    for backend in ("chunked", "recurrent"):
        leaves = {n: t.clone().requires_grad_(n in wanted) for n, t in inputs.items()}
        out, final = kda(**leaves, backend=backend)
        (out if used == "out" else final).square().sum().backward()
        assert all(t.grad is None for n, t in leaves.items() if n not in wanted)
        gradients.append({n: leaves[n].grad for n in wanted})
    assert_close(*gradients, 1e-12)


def test_the_documents_around_the_cuda_kernel() -> None:
    """What surrounds fla-core's kernel, with the recurrence in its place, one call a document."""
    inputs = draw(3, 40, 2, 8, 8, state=True)
    shared = {n: inputs[n] for n in ("A_log", "dt_bias")}

    def kernel(q, k, v, z, beta_logit, states, cu_seqlens):
        if cu_seqlens is None:
            return kda(q, k, v, z, beta_logit, **shared, initial_state=states, backend="recurrent")
        parts = []
        for i, (a, b) in enumerate(pairwise(cu_seqlens.tolist())):
            cut = [t[:, a:b] for t in (q, k, v, z, beta_logit)]
            parts.append(kda(*cut, **shared, initial_state=None if states is None else states[i : i + 1], backend="recurrent"))
        return torch.cat([o for o, _ in parts], 1), torch.cat([s for _, s in parts])

    for starts in (None, starts_of(3, 40, (0, 0), (1, 7), (2, 0), (2, 39)), starts_of(3, 40)):
        for state in (None, inputs["initial_state"]):
            given = [inputs[n] for n in ("q", "k", "v", "z", "beta_logit")]
            got = fla.over_documents(kernel, *given, state, starts)
            want = kda(*given, **shared, initial_state=state, document_starts=starts, backend="recurrent")
            for a, b in zip(got, want):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-6)  # the kernel's states are float32


def test_the_dispatcher_says_once_which_path_runs(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_said", set())
    caplog.set_level(logging.INFO, "k3.kernels")
    inputs = draw(1, 20, 1, 8, 8)
    kda(**inputs)
    kda(**inputs)
    kda(**{n: t[:, :1] if t.dim() > 2 else t for n, t in inputs.items()})
    lines = [r.message for r in caplog.records]
    assert len(lines) == 2
    assert lines[0].startswith("kda: chunked (fla refused: its kernels need CUDA")
    assert lines[1].startswith("kda: recurrent")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lower_bound": -5.5}, r"lower_bound=-5.5: give a value in \[-5, 0\)"),
        ({"lower_bound": 0.0}, "lower_bound=0.0"),
        ({"gate": "sigmoid"}, "gate='sigmoid': no such gate; there are bounded, softplus"),
        ({"backend": "fla"}, "fla refused: its kernels need CUDA, q is on cpu"),
        ({"backend": "fast"}, "no backend named 'fast'; there are fla, chunked, recurrent"),
        ({"dt_bias": torch.zeros(16)}, r"dt_bias has shape \(16,\); .* give it \(2, 8\)"),
        ({"initial_state": torch.zeros(1, 2, 4, 8)}, r"initial_state has shape \(1, 2, 4, 8\); .* give it \(1, 2, 8, 4\)"),
        ({"k": torch.zeros(1, 20, 2, 4)}, "k has shape"),
        ({"document_starts": torch.zeros(1, 19, dtype=torch.bool)}, "document_starts is"),
        ({"q": torch.zeros(1, 0, 2, 8)}, "none empty"),
    ],
)  # fmt: skip
def test_errors_name_the_argument_and_the_fix(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kda(**(draw(1, 20, 2, 8, 4) | change))
