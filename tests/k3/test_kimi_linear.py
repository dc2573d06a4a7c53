"""Kimi Linear's layout (spec 10.2): a random checkpoint against fla-core's recurrence and plain torch, and what is refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import fla
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from k3 import hf
from k3.config import ConfigError, Gate, OutputGate, Residual
from parallel.local import Helper
from tests.k3.published import bytes_of, golden, write

D, H, K, V, NOPE, ROPE, LATENT, EXPERTS, TOP, F_EXPERT, F_DENSE, VOCAB = 48, 2, 16, 16, 16, 8, 24, 8, 3, 32, 80, 98
LAYERS, MLA, SCALING, EPS = 5, (4, 5), 2.446, 1e-5
CONFIG: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "vocab_size": VOCAB, "hidden_size": D,
    "num_hidden_layers": LAYERS, "intermediate_size": F_DENSE, "num_attention_heads": H, "q_lora_rank": None,
    "kv_lora_rank": LATENT, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": V, "mla_use_nope": True,
    "hidden_act": "silu", "rms_norm_eps": EPS, "num_experts": EXPERTS, "num_experts_per_token": TOP, "num_shared_experts": 1,
    "moe_intermediate_size": F_EXPERT, "first_k_dense_replace": 1, "routed_scaling_factor": SCALING, "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "topk_group": 1, "use_grouped_topk": True,
    "moe_layer_freq": 1, "tie_word_embeddings": False, "rope_theta": 10000.0,
    "linear_attn_config": {
        "head_dim": K, "num_heads": H, "short_conv_kernel_size": 4, "kda_layers": [1, 2, 3], "full_attn_layers": [4, 5],
    },
}  # fmt: skip


def shapes() -> dict[str, tuple[int, ...]]:
    """Written out as the release lists them, not read from the cards."""
    p = H * K
    out: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, D),
        "model.norm.weight": (D,),
        "lm_head.weight": (VOCAB, D),
    }
    for i in range(LAYERS):
        layer, a = f"model.layers.{i}.", f"model.layers.{i}.self_attn."
        out |= {f"{layer}input_layernorm.weight": (D,), f"{layer}post_attention_layernorm.weight": (D,)}
        if i + 1 in MLA:
            out |= {f"{a}q_proj.weight": (H * (NOPE + ROPE), D), f"{a}kv_a_proj_with_mqa.weight": (LATENT + ROPE, D)}
            out |= {f"{a}kv_a_layernorm.weight": (LATENT,), f"{a}kv_b_proj.weight": (H * (NOPE + V), LATENT)}
            out |= {f"{a}o_proj.weight": (D, H * V)}
        else:
            for x in "qkv":
                out |= {f"{a}{x}_proj.weight": (p, D), f"{a}{x}_conv1d.weight": (p, 1, 4)}
            out |= {f"{a}A_log": (1, 1, H, 1), f"{a}dt_bias": (p,), f"{a}b_proj.weight": (H, D), f"{a}o_norm.weight": (V,)}
            for x in "fg":
                out |= {f"{a}{x}_a_proj.weight": (K, D), f"{a}{x}_b_proj.weight": (p, K)}
            out |= {f"{a}o_proj.weight": (D, p)}
        if i == 0:
            out |= {f"{layer}mlp.{x}_proj.weight": (F_DENSE, D) for x in ("gate", "up")}
            out |= {f"{layer}mlp.down_proj.weight": (D, F_DENSE)}
        else:
            m = f"{layer}block_sparse_moe."
            out |= {f"{m}gate.weight": (EXPERTS, D), f"{m}gate.e_score_correction_bias": (EXPERTS,)}
            out |= {f"{m}shared_experts.{x}_proj.weight": (F_EXPERT, D) for x in ("gate", "up")}
            out |= {f"{m}shared_experts.down_proj.weight": (D, F_EXPERT)}
            for e in range(EXPERTS):
                out |= {f"{m}experts.{e}.{w}.weight": (D, F_EXPERT) if w == "w2" else (F_EXPERT, D) for w in ("w1", "w2", "w3")}
    return out


def checkpoint() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    out = {}
    for name, shape in shapes().items():
        value = torch.randn(shape, generator=draw) * (0.3 if "conv1d" in name else shape[-1] ** -0.5 if len(shape) == 2 else 0.2)
        if "norm" in name:
            value = value + 1
        if name.endswith("A_log"):
            value = torch.rand(shape, generator=draw).mul(15).add(1).log()  # the decay far below -5
        out[name] = value
    return out


def naive() -> Any:
    """fla-core's file of plain torch functions, without the Triton kernels that importing its package compiles."""
    path = Path(fla.__file__).parent / "ops/kda/naive.py"
    spec = importlib.util.spec_from_file_location("fla_kda_naive", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def kda_layer(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    t = x.shape[1]

    def conv(name: str) -> Tensor:
        y = F.conv1d((x @ w[f"{name}_proj.weight"].T).transpose(1, 2), w[f"{name}_conv1d.weight"], padding=3, groups=H * K)
        return F.silu(y[..., :t]).transpose(1, 2).unflatten(-1, (H, -1))

    q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (conv("q"), conv("k")))
    f = x @ w["f_a_proj.weight"].T @ w["f_b_proj.weight"].T
    g = -w["A_log"].view(H, 1).exp() * F.softplus((f + w["dt_bias"]).unflatten(-1, (H, K)))
    beta = torch.sigmoid(x @ w["b_proj.weight"].T)
    out = naive().naive_recurrent_kda(q, k, conv("v"), g, beta)[0]
    gate = torch.sigmoid(x @ w["g_a_proj.weight"].T @ w["g_b_proj.weight"].T).unflatten(-1, (H, V))
    return (norm(out, w["o_norm.weight"]) * gate).flatten(-2) @ w["o_proj.weight"].T


def mla_layer(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    t = x.shape[1]
    q = (x @ w["q_proj.weight"].T).unflatten(-1, (H, NOPE + ROPE))
    latent, shared = (x @ w["kv_a_proj_with_mqa.weight"].T).split([LATENT, ROPE], -1)
    key, value = (norm(latent, w["kv_a_layernorm.weight"]) @ w["kv_b_proj.weight"].T).unflatten(-1, (H, -1)).split([NOPE, V], -1)
    key = torch.cat([key, shared.unsqueeze(2).expand(-1, -1, H, -1)], -1)
    scores = torch.einsum("bthk,bshk->bhts", q, key) * (NOPE + ROPE) ** -0.5
    scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("bhts,bshv->bthv", scores.softmax(-1), value).flatten(-2) @ w["o_proj.weight"].T


def moe(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    scores = torch.sigmoid(x @ w["gate.weight"].T)
    chosen = (scores + w["gate.e_score_correction_bias"]).topk(TOP, -1).indices
    weights = scores.gather(-1, chosen)
    weights = weights / weights.sum(-1, keepdim=True) * SCALING
    every = torch.stack([mlp(x, *(w[f"experts.{e}.{n}.weight"] for n in ("w1", "w3", "w2"))) for e in range(EXPERTS)], -2)
    routed = (every.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, D)) * weights.unsqueeze(-1)).sum(-2)
    return routed + mlp(x, *(w[f"shared_experts.{n}_proj.weight"] for n in ("gate", "up", "down")))


def logits(tokens: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    def under(prefix: str) -> dict[str, Tensor]:
        return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}

    x = tensors["model.embed_tokens.weight"][tokens]
    for i in range(LAYERS):
        w = under(f"model.layers.{i}.")
        attention = mla_layer if i + 1 in MLA else kda_layer
        x = x + attention(norm(x, w["input_layernorm.weight"]), under(f"model.layers.{i}.self_attn."))
        y = norm(x, w["post_attention_layernorm.weight"])
        dense = (w.get(f"mlp.{n}_proj.weight") for n in ("gate", "up", "down"))
        x = x + (mlp(y, *dense) if i == 0 else moe(y, under(f"model.layers.{i}.block_sparse_moe.")))
    return norm(x, tensors["model.norm.weight"]) @ tensors["lm_head.weight"].T


def test_logits_are_those_of_flas_recurrence_and_plain_torch(tmp_path: Path) -> None:
    tensors = checkpoint()
    model = hf.load(write(tmp_path / "m", tensors, CONFIG)).eval()
    c = model.k3
    assert (c.kda.gate, c.kda.output_gate, c.residual) == (Gate.softplus, OutputGate.low_rank, Residual.sum)
    assert c.mla.q_lora_rank is None and not c.mla.output_gate and not c.latent
    tokens = torch.randint(0, VOCAB, (2, 70), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        got, want = model(tokens), logits(tokens, tensors)
    assert want.std() > 0.3, "nothing to compare"
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)  # fla computes in float32


def test_import_and_export_are_byte_identical(tmp_path: Path) -> None:
    kept = ("A_log", "dt_bias", "e_score_correction_bias")  # the convolutions are bfloat16 here
    tensors = {n: t if n.endswith(kept) else t.bfloat16() for n, t in checkpoint().items()}
    path = write(tmp_path / "m", tensors, CONFIG)
    hf.save(hf.load(path), tmp_path / "again", passthrough=path)
    assert bytes_of(tmp_path / "again") == bytes_of(path)
    assert (tmp_path / "again/config.json").read_bytes() == (path / "config.json").read_bytes()
    hf.save(hf.load(path), tmp_path / "alone")  # nothing but the model: the architecture's own shapes
    assert bytes_of(tmp_path / "alone") == bytes_of(path)
    assert load_file(tmp_path / "alone" / hf.SINGLE)["model.layers.0.self_attn.A_log"].shape == (1, 1, H, 1)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2, "ep": 2, "dp": 2}])
def test_the_same_under_a_layout(sizes: dict[str, int], tmp_path: Path, helper: Helper) -> None:
    path = write(tmp_path / "m", checkpoint(), CONFIG)
    ranks = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("dp", 1)
    helper.run_ranks("tests.k3.published:through", ranks, sizes, str(path), str(tmp_path / "again"), {"passthrough": str(path)})
    assert bytes_of(tmp_path / "again") == bytes_of(path)


def test_one_models_gate_is_refused_on_the_others_weights(tmp_path: Path) -> None:
    """It would run without an error and produce garbage (spec 2.3)."""
    tensors = checkpoint()
    bounded = CONFIG | {"linear_attn_config": CONFIG["linear_attn_config"] | {"gate_lower_bound": -5.0}}
    with pytest.raises(ConfigError, match=r"gate_lower_bound is set in a Kimi Linear configuration.*; remove it"):
        hf.load(write(tmp_path / "bounded", tensors, bounded))
    nested = {"model_type": "kimi_k3", "text_config": bounded}
    with pytest.raises(hf.CheckpointError, match=r"config.json is Kimi K3's.*two checkpoints are mixed up"):
        hf.load(write(tmp_path / "nested", tensors, nested))
    path = golden(tmp_path / "k3", packed=False)
    document = json.loads((path / "config.json").read_text())
    del document["text_config"]["linear_attn_config"]["gate_lower_bound"]
    (path / "config.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=r"gate_lower_bound is missing in a Kimi K3 configuration"):
        hf.load(path)
    (path / "config.json").write_text(json.dumps(document["text_config"]))
    with pytest.raises(hf.CheckpointError, match=r"config.json is Kimi Linear's.*two checkpoints are mixed up"):
        hf.load(path)
