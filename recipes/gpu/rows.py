"""The checks of `make gpu-check`, one a process: `python -m recipes.gpu.rows NAME cuda|cpu RESULT` (see recipes/gpu/check.py).

Each returns what it saw, raises AssertionError where it is not what it must be, or Skipped with the reason.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from recipes.gpu.tools import Skipped, disagreement, distance, random, starts

GOLDEN = Path(__file__).parents[2] / "tests" / "golden" / "k3_tiny"


def golden(device: torch.device) -> str:
    from k3 import hf

    want = {name: value.to(device) for name, value in load_file(GOLDEN / "forward.safetensors").items()}
    labels = torch.cat([want["tokens"][:, 1:], want["tokens"][:, :1]], dim=1)
    mask = torch.ones(1, *labels.shape, dtype=torch.bool, device=device)
    mask[..., -1] = False
    seen = []
    for dtype, bound in ((torch.float32, 5e-4), (torch.float64, 1e-6)):
        model = hf.load(GOLDEN, dtype=dtype).eval()
        with torch.no_grad():
            logits = (model(want["tokens"]).double() - want["logits"].double()).abs().max().item()
        loss = model(want["tokens"], labels=labels, loss_mask=mask).sum() / mask.sum()
        loss.backward()
        off = abs(loss.item() - want["loss"].item())
        assert logits < bound and off < bound, f"{dtype}: logits differ by {logits:.1e}, the loss by {off:.1e}"
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
        parameter = dict(model.named_parameters())["embedding.weight"]
        (published,) = (name for name in load_file(GOLDEN / "grads.safetensors") if name.endswith("embed_tokens.weight"))
        assert parameter.grad is not None
        gradient = distance(parameter.grad, load_file(GOLDEN / "grads.safetensors")[published])
        assert gradient < bound, f"{dtype}: the embedding's gradient, through all layers, differs by {gradient:.1e}"
        seen.append(f"{str(dtype)[6:]} logits {logits:.0e} loss {off:.0e} embedding gradient {gradient:.0e}")
    return "; ".join(seen)


def operators() -> Iterator[tuple[str, Callable[..., Any], dict[str, Tensor], Callable[..., Any] | None]]:
    from kernels.attention import attention
    from kernels.attnres import mix_norm
    from kernels.conv import short_conv
    from kernels.experts import grouped_mlp
    from kernels.norm import gated_rms_norm, rms_norm
    from kernels.situ import situ_glu

    b, t, h, d = 2, 192, 4, 128
    heads = {"q": random(b, t, h, 192), "k": random(b, t, h, 192, seed=1), "v": random(b, t, h, d)}
    yield "attention", lambda **x: attention(**x, scale=192**-0.5), heads | {"document_starts": starts(b, t)}, None
    counts = torch.tensor([70, 0, 33, 25])
    experts = {"x": random(128, 64), "counts": counts, "gate_up": random(4, 128, 64) / 8, "down": random(4, 64, 64) / 8}
    grouped = lambda **x: grouped_mlp(x["x"], x["counts"], x["gate_up"], x["down"], situ_glu, x["probs"])
    yield "experts", grouped, experts | {"probs": random(128).abs()}, None
    conv = lambda **x: short_conv(x["x"], x["weight"], document_starts=x["starts"])[0]
    yield "conv", conv, {"x": random(b, t, 256), "weight": random(256, 4), "starts": starts(b, t)}, None
    yield "norm", lambda **x: rms_norm(**x, eps=1e-5), {"x": random(b, t, d), "weight": random(d)}, None
    gated = {"x": random(b, t, d), "gate": random(b, t, d, seed=2), "weight": random(d)}
    yield "gated norm", lambda **x: gated_rms_norm(**x, eps=1e-5), gated, None
    yield "situ", situ_glu, {"gate": random(t, 256), "up": random(t, 256, seed=3)}, None
    bank = {
        "a": random(t, b, d),
        "b": random(t, b, d, seed=4),
        "norm": random(d),
        "query": random(d, seed=5),
        "out": random(d, seed=6),
    }
    mixed = lambda **x: mix_norm((x["a"], x["b"]), x["norm"], x["query"], x["out"], eps=1e-5)[0]
    yield "attnres", mixed, bank, None


def kernels(device: torch.device) -> str:
    from kernels.newton_schulz import orthogonalise

    seen = []
    for name, run, inputs, exact in operators():
        for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
            off = disagreement(run, inputs, device, dtype, exact)
            assert off < bound, f"{name} in {dtype}: differs by {off:.1e} from float64, {bound:.0e} is allowed"
        seen.append(f"{name} {off:.0e}")
    blocks = random(2, 256, 384).float()
    off = distance(orthogonalise(blocks.to(device)), orthogonalise(blocks.double()))
    assert off < 1e-3, f"newton-schulz differs by {off:.1e}"
    return f"bf16: {', '.join(seen)}; float32 newton-schulz {off:.0e}"


def kda_inputs(length: int, width: int = 128) -> dict[str, Tensor]:
    b, h = 2, 2
    names = ("q", "k", "v", "z")
    heads = {name: random(b, length, h, width, seed=i) for i, name in enumerate(names)}
    small = {"beta_logit": random(b, length, h), "A_log": random(h) / 4, "dt_bias": random(h, width) / 2}
    return heads | small | {"document_starts": starts(b, length)}


def fla(device: torch.device) -> str:
    from kernels.kda import fla as backend
    from kernels.kda import kda

    inputs = kda_inputs(200)
    like = inputs["q"].to(device, torch.bfloat16)
    if (reason := backend.refuses(like, like, like)) is not None:
        raise Skipped(reason)
    seen = []
    for gate in ("bounded", "softplus"):
        run = lambda gate=gate, **x: kda(**x, gate=gate, backend="fla")
        exact = lambda gate=gate, **x: kda(**x, gate=gate, backend="recurrent")
        off = disagreement(run, inputs, device, torch.bfloat16, exact, fp32=("A_log", "dt_bias"))
        assert off < 3e-2, f"{gate} gate: outputs, states or gradients differ by {off:.1e} from the recurrence in float64"
        seen.append(f"{gate} {off:.0e}")
    return "largest difference of outputs and gradients: " + ", ".join(seen)


def main(words: list[str]) -> int:
    name, kind, result = words
    from recipes.gpu import training

    checks: dict[str, Callable[[torch.device], str]] = {
        "golden": golden, "kernels": kernels, "fla": fla, "steps": training.steps, "nano": training.nano,
        "small": training.small, "te": training.te, "trace": training.trace,
    }  # fmt: skip
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        text, state = checks[name](torch.device(kind)), "PASS"
    except Skipped as reason:
        text, state = str(reason), "SKIP"
    except Exception as error:
        traceback.print_exc()
        text, state = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}", "FAIL"
    if kind == "cuda":
        torch.cuda.synchronize()  # a fault that came late ends this process before it has said anything
    Path(result).write_text(json.dumps({"state": state, "text": text}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
