"""One step's forward and backward passes through megatron-core: its gradient buffers and its schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from parallel.world import World


def wrap(module: nn.Module, world: World) -> nn.Module:
    """megatron-core's DistributedDataParallel around a model that carries its `config` (a TransformerConfig).

    Gradients accumulate in contiguous buffers and are read from `parameter.main_grad`: float32 for bf16 and float32
    parameters, float64 for float64 ones. They are summed over data ranks, never averaged: losses carry global denominators.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config: Any = module.config
    # set before wrapping: read at construction, and otherwise gradients come out divided by the data-parallel size
    config.calculate_per_token_loss = True
    double = any(p.dtype == torch.float64 for p in module.parameters())
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=not double, average_in_collective=False)
    return DistributedDataParallel(config, ddp_config, module, pg_collection=world.groups)


def run_step(
    model: nn.Module,
    micro_batches: Sequence[Any],
    forward: Callable[[nn.Module, Any], Tensor],
    loss: Callable[[Any, Tensor], tuple[Tensor, Any]],
    world: World,
) -> list[Any]:
    """Forward and backward over the micro-batches of one step; gradients are complete afterwards.

    `forward(model, batch)` gives the output; `loss(batch, output)` gives (the scalar to differentiate, what to report), the
    scalar already divided by the step's global denominators: nothing is rescaled here. Returns the reports in order.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def finish(chunks: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
        for chunk in chunks:
            chunk.finish_grad_sync()

    def step(iterator: Any, chunk: nn.Module) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Any]]]:
        batch = next(iterator)
        output = forward(chunk, batch)

        def scalar(out: Tensor) -> tuple[Tensor, Tensor, Any]:
            value, report = loss(batch, out)
            # the count is megatron's denominator for a rescaling that `calculate_per_token_loss` plus `finish` leave out
            return value, torch.zeros((), dtype=torch.int, device=value.device), report

        return output, scalar

    config: Any = model.config
    config.finalize_model_grads_func = finish
    config.no_sync_func = model.no_sync
    return get_forward_backward_func(pp_size=world.groups.pp.size(), vp_size=None)(
        forward_step_func=step,
        data_iterator=iter(micro_batches),
        model=[model],
        num_microbatches=len(micro_batches),
        seq_length=0,  # unused without pipelines, as is the next
        micro_batch_size=0,
        forward_only=False,
        pg_collection=world.groups,
    )
