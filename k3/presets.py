"""The named model sizes: `model=tiny|nano|small|linear_48b|k3` and `dense`, the yardstick without any of K3's techniques."""

from __future__ import annotations

from collections.abc import Callable

from k3.config import (
    Activation,
    Attention,
    Balance,
    ConfigError,
    Gate,
    K3Config,
    KDAConfig,
    MLAConfig,
    MoEConfig,
    OutputGate,
    Residual,
)


def tiny() -> K3Config:
    """For tests: every part of the architecture at toy width."""
    return K3Config(
        vocab_size=256, hidden_size=64, layers=9, dense_size=160, residual_block=4, init_std=0.02, mtp_layers=1,
        kda=KDAConfig(heads=4, head_dim=16),
        mla=MLAConfig(heads=4, q_lora_rank=24, kv_lora_rank=16, nope_dim=16, rope_dim=8, v_dim=16),
        moe=MoEConfig(experts=16, top_k=2, latent_size=32, expert_size=32),
    )  # fmt: skip


def nano() -> K3Config:
    """The main job on a plain CPU: beats the bigram on real text in minutes."""
    return K3Config(
        vocab_size=1024, hidden_size=128, layers=9, dense_size=256, residual_block=4, init_std=0.02, mtp_layers=1,
        kda=KDAConfig(heads=2, head_dim=64),
        mla=MLAConfig(heads=2, q_lora_rank=48, kv_lora_rank=32, nope_dim=48, rope_dim=16, v_dim=64),
        moe=MoEConfig(experts=32, top_k=4, latent_size=64, expert_size=64),
    )  # fmt: skip


def small() -> K3Config:
    """About one billion parameters, for one GPU."""
    return K3Config(
        vocab_size=32768, hidden_size=1024, layers=17, dense_size=4096, residual_block=6, mtp_layers=1, init_std=0.012,
        kda=KDAConfig(heads=8),
        mla=MLAConfig(heads=8, q_lora_rank=384, kv_lora_rank=256, nope_dim=128, rope_dim=64, v_dim=128),
        moe=MoEConfig(experts=64, top_k=6, latent_size=512, expert_size=448),
    )  # fmt: skip


def linear_48b() -> K3Config:
    """Kimi Linear 48B-A3B: the smallest public checkpoint with KDA (spec 10.2)."""
    return K3Config(
        vocab_size=163840, hidden_size=2304, layers=27, dense_size=9216, residual=Residual.sum, latent=False, latent_norm=False,
        activation=Activation.swiglu,
        kda=KDAConfig(heads=32, gate=Gate.softplus, output_gate=OutputGate.low_rank),
        mla=MLAConfig(heads=32, q_lora_rank=None, kv_lora_rank=512, nope_dim=128, rope_dim=64, v_dim=128, output_gate=False),
        moe=MoEConfig(experts=256, top_k=8, expert_size=1024, latent_size=2304, shared_experts=1, scaling=2.446),
    )  # fmt: skip


def k3() -> K3Config:
    """Kimi K3: 2.78 T parameters, 104.2 B active without the input embedding (report table 1)."""
    return K3Config()


def dense() -> K3Config:
    """A plain dense transformer of about nano's time per token, the equal-time yardstick of the main job."""
    return K3Config(
        vocab_size=1024, hidden_size=256, layers=4, dense_layers=4, dense_size=704, init_std=0.02,
        attention=Attention.mla, residual=Residual.sum, latent=False, activation=Activation.swiglu,
        kda=KDAConfig(heads=4, head_dim=64),
        mla=MLAConfig(heads=4, q_lora_rank=None, kv_lora_rank=128, nope_dim=48, rope_dim=16, v_dim=64, output_gate=False),
        moe=MoEConfig(experts=0, balance=Balance.none),
    )  # fmt: skip


PRESETS: dict[str, Callable[[], K3Config]] = {f.__name__: f for f in (tiny, nano, small, linear_48b, k3, dense)}


def preset(name: str) -> K3Config:
    """A fresh, validated copy of a preset. Raises ConfigError with the names there are."""
    if name not in PRESETS:
        raise ConfigError(f"model={name}: no such preset; there are {', '.join(PRESETS)}")
    return PRESETS[name]().validate()
