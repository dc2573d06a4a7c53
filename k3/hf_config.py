"""Between K3Config and the config.json of a published checkpoint (spec 1.1, 10.1)."""

from __future__ import annotations

from typing import Any

from k3.config import Activation, Attention, ConfigError, Gate, K3Config, KDAConfig, MLAConfig, MoEConfig, OutputGate, Residual

_FIXED = {  # text_config entries that have one value in every K3 checkpoint: another one is another model
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "tie_word_embeddings": False,
}


def from_published(document: dict[str, Any]) -> K3Config:
    """The model of a config.json. Raises ConfigError naming an entry that is missing or that this stack cannot represent."""
    text = document.get("text_config", document)
    if not isinstance(text, dict):
        raise ConfigError(f"config.json: text_config is {text!r}; an object is expected")
    for key, value in _FIXED.items():
        if text.get(key, value) != value:
            raise ConfigError(f"config.json: {key}={text[key]!r} is not a K3 model; expected {value!r}")
    try:
        kda, layers = text["linear_attn_config"], text["num_hidden_layers"]
        bounded = kda.get("gate_lower_bound") is not None
        _refuse_mixture(document, bounded)
        config = K3Config(
            vocab_size=text["vocab_size"],
            hidden_size=text["hidden_size"],
            layers=layers,
            dense_layers=text["first_k_dense_replace"],
            dense_size=text["intermediate_size"],
            attention=Attention.hybrid if kda["kda_layers"] else Attention.mla,
            residual=Residual.attnres if text.get("attn_res_block_size") else Residual.sum,
            residual_block=text.get("attn_res_block_size") or K3Config.residual_block,
            latent=bool(text.get("routed_expert_hidden_size")),
            latent_norm=bool(text.get("latent_moe_use_norm", False)),
            activation=_activation(text["hidden_act"]),
            situ_beta=text.get("activation_situ_beta", K3Config.situ_beta),
            situ_linear_beta=text.get("activation_situ_linear_beta", K3Config.situ_linear_beta),
            norm_eps=text["rms_norm_eps"],
            init_std=text.get("initializer_range", K3Config.init_std),
            mtp_layers=text.get("num_nextn_predict_layers", 0),
            draft=bool(text.get("nextn_predict_reads_blocks", False)),  # our name: no release has one
            kda=KDAConfig(
                heads=kda["num_heads"],
                head_dim=kda["head_dim"],
                conv_size=kda["short_conv_kernel_size"],
                gate=Gate.bounded if bounded else Gate.softplus,
                lower_bound=kda["gate_lower_bound"] if bounded else KDAConfig.lower_bound,
                output_gate=OutputGate.full if kda.get("use_full_rank_gate") else OutputGate.low_rank,
            ),
            mla=MLAConfig(
                heads=text["num_attention_heads"],
                q_lora_rank=text.get("q_lora_rank"),
                kv_lora_rank=text["kv_lora_rank"],
                nope_dim=text["qk_nope_head_dim"],
                rope_dim=text["qk_rope_head_dim"],
                v_dim=text["v_head_dim"],
                output_gate=bool(text.get("mla_use_output_gate", False)),
            ),
            moe=MoEConfig(
                experts=text["num_experts"],
                top_k=text["num_experts_per_token"],
                latent_size=text.get("routed_expert_hidden_size") or text["hidden_size"],
                expert_size=text["moe_intermediate_size"],
                shared_experts=text["num_shared_experts"],
                renormalise=text["moe_renormalize"],
                scaling=text["routed_scaling_factor"],
            ),
        )
    except KeyError as missing:
        kind = document.get("model_type")
        whose = f"Kimi K3 and Kimi Linear have it (model_type={kind!r})"
        raise ConfigError(f"config.json: the entry {missing} is missing; {whose}") from None
    except ConfigError:
        raise
    except (TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"config.json: an entry has the wrong type ({error})") from None
    try:
        config.validate()
    except TypeError as error:
        raise ConfigError(f"config.json: an entry has the wrong type ({error})") from None
    expected = [i + 1 for i in range(layers) if not config.is_mla(i)]
    if kda["kda_layers"] != expected:
        raise ConfigError(f"config.json: kda_layers={kda['kda_layers']}; this stack places KDA in layers {expected}, from 1")
    return config


def to_published(config: K3Config) -> dict[str, Any]:
    """The config.json that goes with `config`'s weights. Inverse of `from_published` for everything that shapes the model."""
    kda, mla, moe = config.kda, config.mla, config.moe
    places = {kind: [i + 1 for i in range(config.layers) if config.is_mla(i) == kind] for kind in (False, True)}
    linear: dict[str, Any] = {
        "head_dim": kda.head_dim,
        "num_heads": kda.heads,
        "short_conv_kernel_size": kda.conv_size,
        "kda_layers": places[False],
        "full_attn_layers": places[True],
        "use_full_rank_gate": kda.output_gate is OutputGate.full,
    }
    if kda.gate is Gate.bounded:
        linear["gate_lower_bound"] = kda.lower_bound
    text: dict[str, Any] = {
        "model_type": "kimi_linear",
        "hidden_act": "situ" if config.activation is Activation.situ else "silu",
        "mla_use_nope": True,
        "mla_use_output_gate": mla.output_gate,
        "latent_moe_use_norm": config.latent_norm,
        "moe_router_activation_func": "sigmoid",
        "moe_layer_freq": 1,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.layers,
        "intermediate_size": config.dense_size,
        "rms_norm_eps": config.norm_eps,
        "num_attention_heads": mla.heads,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.nope_dim,
        "qk_rope_head_dim": mla.rope_dim,
        "v_head_dim": mla.v_dim,
        "num_experts": moe.experts,
        "num_experts_per_token": moe.top_k,
        "num_shared_experts": moe.shared_experts,
        "moe_intermediate_size": moe.expert_size,
        "first_k_dense_replace": config.dense_layers,
        "routed_scaling_factor": moe.scaling,
        "moe_renormalize": moe.renormalise,
        "activation_situ_beta": config.situ_beta,
        "activation_situ_linear_beta": config.situ_linear_beta,
        "initializer_range": config.init_std,
        "num_nextn_predict_layers": config.mtp_layers,
        "linear_attn_config": linear,
    }
    if config.draft:
        text["nextn_predict_reads_blocks"] = True
    if config.latent:
        text["routed_expert_hidden_size"] = moe.latent_size
    if config.residual is Residual.attnres:
        text["attn_res_block_size"] = config.residual_block
    if kda.gate is Gate.softplus:
        return {"architectures": ["KimiLinearForCausalLM"], **text}
    return {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": text}


def _refuse_mixture(document: dict[str, Any], bounded: bool) -> None:
    """One gate applied to the other model's weights runs without an error and produces garbage (spec 2.3)."""
    nested = "text_config" in document
    if bounded and not nested:
        raise ConfigError(
            "config.json: linear_attn_config.gate_lower_bound is set in a Kimi Linear configuration (no text_config), whose "
            "decay is a softplus without bound; remove it, or give Kimi K3's layout"
        )
    if nested and not bounded:
        raise ConfigError(
            "config.json: linear_attn_config.gate_lower_bound is missing in a Kimi K3 configuration, whose decay is bounded; "
            f"give it (the release's is {KDAConfig.lower_bound}), or Kimi Linear's layout, without text_config"
        )


def _activation(name: str) -> Activation:
    if name == "situ":
        return Activation.situ
    if name in ("silu", "swiglu"):
        return Activation.swiglu
    raise ConfigError(f"config.json: hidden_act={name!r}; expected 'situ' or 'silu'")
