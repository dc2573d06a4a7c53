"""The megatron-core configuration of a K3 model: what its linear layers, dispatcher and schedules read."""

from __future__ import annotations

import torch

from k3.config import K3Config
from parallel.megatron import TransformerConfig
from parallel.world import World


def megatron_config(config: K3Config, world: World, dtype: torch.dtype) -> TransformerConfig:
    """Sizes that K3's own layers decide (head counts of KDA, latent ranks) do not appear: megatron never sees those layers."""
    moe = config.moe.experts > 0
    groups = world.groups
    pp, vpp = world.config.pp, world.config.vpp
    return TransformerConfig(
        # a number that megatron-core accepts for even stages: layers are split by parallel.stages, never by it
        num_layers=config.layers if pp == 1 else pp * vpp * config.layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.mla.heads,
        layernorm_epsilon=config.norm_eps,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # parameters are made under `with torch.device(...)` and drawn by name in k3/init.py, whatever the layout
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=groups.tp.size(),
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        pipeline_dtype=dtype,
        variable_seq_lengths=pp > 1,  # a payload's length depends on the rows it carries: it travels ahead of them
        # Between virtual stages megatron-core is right in this way alone: batched it mixes up the two neighbours of two ranks and
        # hangs on four, neither batched nor overlapped it fails on two and hangs on three.
        batch_p2p_comm=False,
        overlap_p2p_comm=vpp > 1,
        overlap_p2p_comm_warmup_flush=world.config.overlap_warmup,
        deallocate_pipeline_outputs=pp > 1,
        context_parallel_size=groups.cp.size(),
        expert_model_parallel_size=groups.ep.size() if moe else 1,
        expert_tensor_parallel_size=1 if moe else None,
        sequence_parallel=world.sequence_parallel,
        num_moe_experts=config.moe.experts or None,
        moe_router_topk=config.moe.top_k,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",  # the default all-gather refuses variable shapes
        moe_ffn_hidden_size=config.moe.expert_size if moe else None,
        calculate_per_token_loss=True,
    )
