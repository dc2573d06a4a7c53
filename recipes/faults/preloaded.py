"""All that a run imports, those parts included that it imports late: for the process that its ranks are forked from."""

from __future__ import annotations

import importlib
import logging
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # megatron-core's remarks, and invalid escapes in what is compiled for the first time
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "No CUDA runtime is found"
    import parallel.megatron
    import recipes.cli
    import recipes.faults.start
    import recipes.training
    from parallel.local import LATER

    for name in (
        *LATER,
        "k3.hf",
        "matplotlib.figure",
        "matplotlib.backends.backend_agg",
        "megatron.core.dist_checkpointing.core",
        "megatron.core.dist_checkpointing.strategies.filesystem_async",
        "megatron.core.dist_checkpointing.strategies.state_dict_saver",
        "parallel.checkpoint_index",
        "recipes.validate",
        "tokenizers",
    ):
        importlib.import_module(name)

__all__ = ["parallel", "recipes"]
