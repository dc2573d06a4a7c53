"""One step's forward and backward passes through megatron-core: its gradient buffers and its schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.cards import CardTable, TensorAxis
from parallel.shards import Shard, Shards
from parallel.world import World


class ParallelModel:
    """A model inside megatron-core's gradient buffers. `module` is the model itself, `ddp` megatron-core's wrapper around it.

    Gradients accumulate in contiguous buffers and are read from `parameter.main_grad`: float32 for bf16 and float32 parameters,
    float64 for float64 ones. They are summed over data and context ranks, never averaged: losses carry global denominators.
    """

    def __init__(self, module: nn.Module, cards: CardTable, world: World):
        self.module, self.world = module, world
        self.ddp = _buffers(module, world)
        self.shards = Shards.of(self.ddp, cards, world)
        self.replicated = [self.shards[card.name] for card, _ in cards.trained() if _sums_over_tensor_ranks(card, world)]

    def zero_grad(self) -> None:
        self.ddp.zero_grad_buffer()

    def finish(self) -> None:
        """Completes the step's gradients: over data and context ranks, then over tensor ranks where copies saw parts."""
        self.ddp.finish_grad_sync()
        if self.world.groups.tp.size() > 1:
            _sum_over_tensor_ranks(self.replicated, self.world)


def wrap(module: nn.Module, cards: CardTable, world: World) -> ParallelModel:
    """Puts a model that carries its `config` (a TransformerConfig) into megatron-core's buffers."""
    return ParallelModel(module, cards, world)


def _buffers(module: nn.Module, world: World) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    config: Any = module.config
    # set before wrapping: read at construction, and otherwise gradients come out divided by the data-parallel size
    config.calculate_per_token_loss = True
    double = any(p.dtype == torch.float64 for p in module.parameters())
    replicas = world.groups.dp_cp.size() > 1 or world.groups.expt_dp.size() > 1
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=not double,
        average_in_collective=False,
        use_distributed_optimizer=world.config.zero > 0 and replicas,
        overlap_grad_reduce=world.config.overlap and replicas,
        bucket_size=world.config.bucket,
    )
    layout = None
    if ddp_config.use_distributed_optimizer:
        # what megatron-core computes by itself where none is given, with the bucket size it would choose, and without a warning
        if ddp_config.bucket_size is None and ddp_config.overlap_grad_reduce:
            ddp_config.bucket_size = max(40_000_000, 1_000_000 * world.groups.dp_cp.size())
        bucket = ddp_config.bucket_size if ddp_config.overlap_grad_reduce else None
        layout = DistributedOptimizer.compute_full_param_layout(
            [p for p in module.parameters() if p.requires_grad], bucket, world.groups.dp_cp.size(), ddp_config,
            expert_data_parallel_world_size=world.groups.expt_dp.size(),
        )  # fmt: skip
    return DistributedDataParallel(config, ddp_config, module, pg_collection=world.groups, full_param_layout=layout)


def _sums_over_tensor_ranks(card: Any, world: World) -> bool:
    axis = card.placement.tensor
    return axis is TensorAxis.REPLICATE_SUM or (axis is TensorAxis.REPLICATE_SEQUENCE and world.sequence_parallel)


@torch.no_grad()
def _sum_over_tensor_ranks(shards: Sequence[Shard], world: World) -> None:
    """One all-reduce a dtype. Tensor ranks cut their buffers alike, so under ZeRO only the parts that are reduced take part."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for shard in shards:
        gradient = shard.gradient
        if gradient is not None and gradient.numel():
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for gradients in by_dtype.values():
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat, group=world.groups.tp)
        for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients])):
            gradient.copy_(summed.view(gradient.shape))


def run_step(
    model: ParallelModel,
    micro_batches: Sequence[Any],
    forward: Callable[[nn.Module, Any], Tensor],
    loss: Callable[[Any, Tensor], tuple[Tensor, Any]],
) -> list[Any]:
    """Forward and backward over the micro-batches of one step; gradients are complete afterwards.

    `forward(model, batch)` gives the output; `loss(batch, output)` gives (the scalar to differentiate, what to report), the
    scalar already divided by the step's global denominators: nothing is rescaled here. Returns the reports in order.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def finish(chunks: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
        model.finish()

    def step(iterator: Any, chunk: nn.Module) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Any]]]:
        batch = next(iterator)
        output = forward(chunk, batch)

        def scalar(out: Tensor) -> tuple[Tensor, Tensor, Any]:
            value, report = loss(batch, out)
            # the count is megatron's denominator for a rescaling that `calculate_per_token_loss` plus `finish` leave out
            return value, torch.zeros((), dtype=torch.int, device=value.device), report

        return output, scalar

    config: Any = model.module.config
    config.finalize_model_grads_func = finish
    config.no_sync_func = model.ddp.no_sync
    return get_forward_backward_func(pp_size=model.world.groups.pp.size(), vp_size=None)(
        forward_step_func=step,
        data_iterator=iter(micro_batches),
        model=[model.ddp],
        num_microbatches=len(micro_batches),
        seq_length=0,  # unused without pipelines, as is the next
        micro_batch_size=0,
        forward_only=False,
        pg_collection=model.world.groups,
    )
