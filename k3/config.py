"""The model's configuration: typed dataclasses and the rules they must keep (report table 1, spec section 1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum


class ConfigError(ValueError):
    """A contradictory model configuration; the message names the field, the value and the rule."""


class Residual(Enum):
    attnres = "attnres"  # Block Attention Residuals
    sum = "sum"  # the plain residual stream


class Activation(Enum):
    situ = "situ"
    swiglu = "swiglu"


class Attention(Enum):
    hybrid = "hybrid"  # KDA, KDA, KDA, MLA ..., the last layer always MLA
    mla = "mla"  # MLA everywhere


class Balance(Enum):
    quantile = "quantile"  # Quantile Balancing by the pooled histogram
    bias = "bias"  # DeepSeek-V3's fixed step on the sign of the load error
    aux = "aux"  # auxiliary loss
    none = "none"


class Gate(Enum):
    bounded = "bounded"  # g = lower_bound * sigmoid(exp(A) (f + dt_bias)), K3
    softplus = "softplus"  # g = -exp(A) softplus(f + dt_bias), Kimi Linear


class OutputGate(Enum):
    full = "full"  # one [P, d] matrix, K3
    low_rank = "low_rank"  # two matrices of rank head_dim, Kimi Linear
    none = "none"


@dataclass
class KDAConfig:
    heads: int = 96
    head_dim: int = 128  # of keys and values
    conv_size: int = 4
    gate: Gate = Gate.bounded
    lower_bound: float = -5.0
    output_gate: OutputGate = OutputGate.full


@dataclass
class MLAConfig:
    heads: int = 96
    q_lora_rank: int | None = 1536  # null: a direct query projection
    kv_lora_rank: int = 512
    nope_dim: int = 128  # per-head key width
    rope_dim: int = 64  # the shared key's width; never rotated, the name is the release's
    v_dim: int = 128
    output_gate: bool = True


@dataclass
class MoEConfig:
    experts: int = 896  # 0: every feed-forward part is dense
    top_k: int = 16
    latent_size: int = 3584
    expert_size: int = 3072  # width inside one expert
    shared_experts: int = 2
    renormalise: bool = True
    scaling: float = 1.0
    balance: Balance = Balance.quantile
    bins: int = 1000  # of the pooled histogram
    ema: float = 0.0  # over steps, of the estimated quantiles; 0 is the report's main text
    bias_step: float = 1e-3  # balance=bias
    aux_weight: float = 1e-2  # balance=aux


@dataclass
class K3Config:
    vocab_size: int = 163840
    hidden_size: int = 7168
    layers: int = 93
    dense_layers: int = 1  # the first ones have a dense feed-forward part
    dense_size: int = 33792
    attention: Attention = Attention.hybrid
    residual: Residual = Residual.attnres
    residual_block: int = 12  # decoder layers per Attention Residual block
    latent: bool = True  # false: experts work at full width
    latent_norm: bool = True  # RMSNorm on the routed sum before the up-projection
    activation: Activation = Activation.situ
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    norm_eps: float = 1e-5
    init_std: float = 0.006
    mtp_layers: int = 0
    mtp_weight: float = 0.1  # of each MTP layer's loss
    draft: bool = False  # the MTP layer reads blocks of the backbone too, through a matrix of its own (report 4.3)
    kda: KDAConfig = field(default_factory=KDAConfig)
    mla: MLAConfig = field(default_factory=MLAConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)

    def is_mla(self, layer: int) -> bool:
        """Whether decoder layer `layer` (from 0) is MLA: every fourth and the last."""
        return self.attention is Attention.mla or (layer + 1) % 4 == 0 or layer == self.layers - 1

    def is_moe(self, layer: int) -> bool:
        return self.moe.experts > 0 and layer >= self.dense_layers

    @property
    def draft_blocks(self) -> tuple[int, ...]:
        """The Attention Residual blocks, from 1, that a draft reads beside the backbone's state: 1 and 4; of models with fewer
        than five, the first and the middle one before the last. None on a plain residual stream.
        """
        before_last = -(-self.layers // self.residual_block) - 1 if self.residual is Residual.attnres else 0
        return (1, 4) if before_last >= 4 else tuple(sorted({1, 1 + before_last // 2})) if before_last else ()

    @property
    def expert_width(self) -> int:
        """Width of the vectors that experts read and write."""
        return self.moe.latent_size if self.latent else self.hidden_size

    def validate(self) -> K3Config:
        """Returns itself, or raises ConfigError with every broken rule, one a line."""
        broken = [f"model.{name}={value}: {rule}" for name, value, rule in _broken_rules(self)]
        if broken:
            raise ConfigError("\n".join(broken))
        return self


def _broken_rules(c: K3Config) -> Iterator[tuple[str, object, str]]:
    for name in ("vocab_size", "hidden_size", "layers", "residual_block"):
        if getattr(c, name) < 1:
            yield name, getattr(c, name), "must be at least 1"
    if c.hidden_size % 8:
        yield "hidden_size", c.hidden_size, "must be a multiple of 8"
    if not 0 <= c.dense_layers <= c.layers:
        yield "dense_layers", c.dense_layers, f"must lie in 0..layers ({c.layers})"
    if (c.dense_layers or not c.moe.experts) and c.dense_size < 1:
        yield "dense_size", c.dense_size, "must be at least 1 where a layer is dense"
    if c.mtp_layers < 0:
        yield "mtp_layers", c.mtp_layers, "must be at least 0"
    if c.mtp_weight < 0:
        yield "mtp_weight", c.mtp_weight, "must be at least 0"
    if c.draft and c.mtp_layers != 1:
        yield "draft", c.draft, f"a draft is one MTP layer, and model.mtp_layers={c.mtp_layers}; give 1, or model.draft=false"
    for name in ("situ_beta", "situ_linear_beta", "norm_eps", "init_std"):
        if getattr(c, name) <= 0:
            yield name, getattr(c, name), "must be positive"

    k = c.kda
    for name in ("heads", "head_dim", "conv_size"):
        if getattr(k, name) < 1:
            yield f"kda.{name}", getattr(k, name), "must be at least 1"
    if not -5.0 <= k.lower_bound < 0:
        yield "kda.lower_bound", k.lower_bound, "must lie in [-5, 0): beyond it a 16-token tile overflows float32 (report 2.1.1)"

    m = c.mla
    for name in ("heads", "kv_lora_rank", "nope_dim", "v_dim"):
        if getattr(m, name) < 1:
            yield f"mla.{name}", getattr(m, name), "must be at least 1"
    if m.rope_dim < 0:
        yield "mla.rope_dim", m.rope_dim, "must be at least 0"
    if m.q_lora_rank is not None and m.q_lora_rank < 1:
        yield "mla.q_lora_rank", m.q_lora_rank, "must be at least 1, or null for a direct projection"

    e = c.moe
    if e.experts < 0:
        yield "moe.experts", e.experts, "must be at least 0"
    if e.experts:
        if not 1 <= e.top_k < e.experts:
            yield "moe.top_k", e.top_k, f"must lie in 1..experts-1 ({e.experts - 1}): balancing needs the (k+1)-th score"
        for name in ("expert_size", "latent_size", "bins"):
            if getattr(e, name) < 1:
                yield f"moe.{name}", getattr(e, name), "must be at least 1"
        if e.shared_experts < 0:
            yield "moe.shared_experts", e.shared_experts, "must be at least 0"
        if not 0 <= e.ema < 1:
            yield "moe.ema", e.ema, "must lie in [0, 1)"
        for name in ("bias_step", "aux_weight", "scaling"):
            if getattr(e, name) < 0:
                yield f"moe.{name}", getattr(e, name), "must be at least 0"
