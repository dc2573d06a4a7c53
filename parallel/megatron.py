"""The megatron-core parts that models are made of, imported behind the CPU backend.

Importing them from here rather than from megatron guarantees the order: backend first, megatron second.
"""

from __future__ import annotations

import warnings

from parallel import cpu_backend

cpu_backend.install()

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # "Transformer Engine and Apex are not installed ..."
    from megatron.core.enums import ModelType
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    from megatron.core.tensor_parallel.mappings import (
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
        gather_from_tensor_model_parallel_region,
        scatter_to_sequence_parallel_region,
    )
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = [
    "ColumnParallelLinear",
    "MegatronModule",
    "ModelType",
    "RowParallelLinear",
    "TransformerConfig",
    "VocabParallelEmbedding",
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "scatter_to_sequence_parallel_region",
]
