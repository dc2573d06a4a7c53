"""Process groups, the CPU backend, expert dispatch, gradient reductions, checkpoints. Knows nothing of K3.

    world = parallel.start(cfg.parallel)        # process groups; the CPU backend where there is no CUDA
    model = parallel.wrap(stage, cards, world)  # megatron-core's gradient buffers around a model
    parallel.run_step(model, micro_batches, forward, loss)

Names are resolved on first use, so that `parallel.config` and `parallel.cards` can be read without importing megatron.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallel.config import ParallelError, check_sizes
    from parallel.schedule import ParallelModel, run_step, wrap
    from parallel.shards import Shards
    from parallel.world import World, start, stop

_HOME = {
    "ParallelError": "config", "check_sizes": "config", "World": "world", "start": "world", "stop": "world",
    "wrap": "schedule", "run_step": "schedule", "ParallelModel": "schedule", "Shards": "shards",
}  # fmt: skip
__all__ = ["ParallelError", "ParallelModel", "Shards", "World", "check_sizes", "run_step", "start", "stop", "wrap"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'parallel' has no attribute {name!r}")
    return getattr(import_module(f"parallel.{_HOME[name]}"), name)
