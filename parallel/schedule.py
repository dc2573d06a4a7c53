"""One step's forward and backward passes through megatron-core: its gradient buffers and its schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.buffer_layout import items_of, rearranged
from parallel.cards import CardTable, TensorAxis
from parallel.config import ParallelError
from parallel.rows import RowBank
from parallel.shards import Shard, Shards
from parallel.stages import group_size
from parallel.world import World

if TYPE_CHECKING:
    from parallel.zero2 import Zero2


class ParallelModel:
    """This rank's pipeline stages, each inside megatron-core's gradient buffers. `module` holds all their parameters, `ddps` are
    megatron-core's wrappers around the stages. Where it has `fixed_weights()`, passes run inside that context, in which no
    parameter changes.

    Gradients accumulate in contiguous buffers and are read from `shards`: float32 for bf16 and float32 parameters, float64 for
    float64 ones. They are summed over data and context ranks, never averaged: losses carry global denominators.
    """

    def __init__(self, module: nn.Module, cards: CardTable, world: World):
        self.module, self.world = module, world
        self.rows: RowBank | None = getattr(module, "rows", None)
        stages: Sequence[nn.Module] = getattr(module, "stages", (module,))
        if world.config.pp > 1:
            _check_pipeline(stages[0].config)
        self.zero2: Zero2 | None = None
        if world.config.zero == 2:
            from parallel.zero2 import Zero2

            self.zero2 = Zero2(stages, world, cards)
        self.ddps: list[Any] = list(self.zero2.chunks) if self.zero2 else [_buffers(stage, cards, world) for stage in stages]
        self.shards = Shards.of(self.ddps, cards, world)
        self.replicated = [self.shards[card.name] for card, _ in cards.trained() if _sums_over_tensor_ranks(card, world)]
        self.at_both_ends = [self.shards[card.name] for card, _ in cards.trained() if card.placement.both_ends]

    @property
    def config(self) -> Any:
        """The TransformerConfig that all stages share."""
        return self.ddps[0].module.config

    def zero_grad(self) -> None:
        for ddp in self.ddps:
            ddp.zero_grad_buffer()

    def finish(self) -> None:
        """Completes the step's gradients: over data and context ranks, then over tensor ranks where copies saw parts, then over
        both ends of the pipeline.
        """
        groups = self.world.groups
        for ddp in self.ddps:
            ddp.finish_grad_sync()
        if groups.tp.size() > 1:
            _sum_over(groups.tp, self.replicated)
        if groups.pp.size() > 1 and groups.pp.rank() in (0, groups.pp.size() - 1):
            _sum_over(groups.embd, self.at_both_ends)


def wrap(module: nn.Module, cards: CardTable, world: World) -> ParallelModel:
    """Puts a model into megatron-core's buffers.

    A model cut for pipelines has `stages`, this rank's, each with its `config` (a TransformerConfig), and `rows`, the RowBank
    that they share. Any other is one stage and has the `config` itself.
    """
    return ParallelModel(module, cards, world)


def _check_pipeline(config: Any) -> None:
    """Raises ParallelError for what megatron-core takes and gets wrong between stages that exchange rows."""
    wrong = []
    if config.batch_p2p_comm:
        wrong.append("batch_p2p_comm=True: payloads of other lengths hang, and two ranks mix up their neighbours; give False")
    if not config.variable_seq_lengths:
        wrong.append("variable_seq_lengths=False: payloads have other lengths from hop to hop; give True")
    if config.overlap_moe_expert_parallel_comm:
        wrong.append("overlap_moe_expert_parallel_comm=True: runs stages in pieces, which the row bank cannot follow; give False")
    if wrong:
        raise ParallelError("\n".join(wrong))


def _buffers(module: nn.Module, cards: CardTable, world: World) -> Any:
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
        # buckets as megatron-core makes them where none are given, with the bucket size it would choose
        if ddp_config.bucket_size is None and ddp_config.overlap_grad_reduce:
            ddp_config.bucket_size = max(40_000_000, 1_000_000 * world.groups.dp_cp.size())
        bucket = ddp_config.bucket_size if ddp_config.overlap_grad_reduce else None
        layout = DistributedOptimizer.compute_full_param_layout(
            [p for p in module.parameters() if p.requires_grad], bucket, world.groups.dp_cp.size(), ddp_config,
            expert_data_parallel_world_size=world.groups.expt_dp.size(),
        )  # fmt: skip
        layout = rearranged(layout, items_of(cards, world.groups.tp.size()))
    return DistributedDataParallel(config, ddp_config, module, pg_collection=world.groups, full_param_layout=layout)


def _sums_over_tensor_ranks(card: Any, world: World) -> bool:
    axis = card.placement.tensor
    return axis is TensorAxis.REPLICATE_SUM or (axis is TensorAxis.REPLICATE_SEQUENCE and world.sequence_parallel)


@torch.no_grad()
def _sum_over(group: Any, shards: Sequence[Shard]) -> None:
    """One all-reduce a dtype over ranks that cut these parameters alike: under ZeRO only the parts that are reduced take part."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for shard in shards:
        gradient = shard.gradient
        if gradient is not None and gradient.numel():
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for gradients in by_dtype.values():
        flat = torch.cat([g.reshape(-1) for g in gradients]).to(shards[0].parameter.device)  # from the CPU where it is offloaded
        dist.all_reduce(flat, group=group)
        for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients])):
            gradient.copy_(summed.view(gradient.shape))


type Forward = Callable[[nn.Module, Any], Tensor]
type Loss = Callable[[Any, Tensor], tuple[Tensor, Any]]


def run_step(model: ParallelModel, micro_batches: Sequence[Any], forward: Forward, loss: Loss) -> list[Any]:
    """Forward and backward over the micro-batches of one step; gradients are complete afterwards.

    `forward(stage, batch)` gives a stage's output; `loss(batch, output)`, called for the last stage's, gives (the scalar to
    differentiate, what to report), the scalar already divided by the step's global denominators: nothing is rescaled here.
    Returns the reports in order; on ranks without the last stage none.
    """

    def finish(chunks: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
        model.finish()

    group = group_size(model.world.config, len(micro_batches)) if model.world.config.vpp > 1 else 1
    if model.zero2 is not None:
        model.zero2.begin_step(len(micro_batches), group)
    no_sync = [ddp.no_sync for ddp in model.ddps]
    model.config.finalize_model_grads_func = finish
    model.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return _run(model, micro_batches, forward, loss, group=group)


@torch.no_grad()
def evaluate(model: ParallelModel, batches: Sequence[Any], forward: Forward, report: Callable[[Any, Tensor], Any]) -> list[Any]:
    """Forward alone: `report(batch, output)` of the last stage for every batch, in order; on ranks without that stage none."""
    given, layout, group = list(batches), model.world.config, 1
    if layout.vpp > 1:  # virtual stages need as many as there are ranks: the last one again, its report dropped
        given += given[-1:] * (layout.pp - len(given))
        group = group_size(replace(layout, group=None), len(given))  # the typed group is for steps, which have another number
    nothing = torch.zeros((), device=model.world.device)
    reports = _run(model, given, forward, lambda batch, output: (nothing, report(batch, output)), group=group, forward_only=True)
    return reports[: len(batches)]


def _run(
    model: ParallelModel, batches: Sequence[Any], forward: Forward, loss: Loss, *, group: int, forward_only: bool = False
) -> list[Any]:
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    def step(iterator: Any, chunk: nn.Module) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Any]]]:
        number, batch = next(iterator)
        if model.rows is not None:
            model.rows.micro_batch = number  # every stage sees the micro-batches in order, whatever the schedule
        output = forward(chunk, batch)

        def scalar(out: Tensor) -> tuple[Tensor, Tensor, Any]:
            value, report = loss(batch, out)
            # the count is megatron's denominator for a rescaling that `calculate_per_token_loss` plus `finish` leave out
            return value, torch.zeros((), dtype=torch.int, device=value.device), report

        return output, scalar

    layout, groups, config = model.world.config, model.world.groups, model.config
    options: dict[str, Any] = {}
    if layout.pp > 1:
        options["p2p_communicator"] = P2PCommunicator(groups.pp, config)
    config.microbatch_group_size_per_vp_stage = group
    try:
        with getattr(model.module, "fixed_weights", nullcontext)():
            reports: list[Any] = get_forward_backward_func(pp_size=layout.pp, vp_size=layout.vpp if layout.vpp > 1 else None)(
                forward_step_func=step,
                data_iterator=[iter(enumerate(batches)) for _ in model.ddps],
                model=list(model.ddps),
                num_microbatches=len(batches),
                seq_length=1,  # unused, as is the next: payloads carry their shape
                micro_batch_size=1,
                forward_only=forward_only,
                pg_collection=groups,
                **options,
            )
        if model.rows is not None:
            model.rows.check_empty()
        return reports
    finally:
        if model.rows is not None:
            model.rows.clear()


def from_last_stage(values: Tensor, world: World) -> Tensor:
    """The tensor of the ranks that hold the last stage, on all pipeline ranks; each gives one of its shape. In place."""
    group = world.groups.pp
    if group.size() > 1:
        dist.broadcast(values, src=dist.get_global_rank(group, group.size() - 1), group=group)
    return values
