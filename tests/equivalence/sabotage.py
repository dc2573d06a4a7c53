"""Breaks one thing on a rank and then traces it: what a proof must notice. Each name says what is broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import k3.kda
import k3.mla
import parallel.rows
import recipes.rl.objective
from k3.balance import Balancer
from k3.feed_forward import LatentMoE
from k3.stage import Stage
from parallel.rows import RowBank
from parallel.schedule import ParallelModel
from parallel.shards import Shards
from recipes.config import Config
from recipes.proof.rank import on_rank
from recipes.proof.trace import Trace
from recipes.rl.objective import PolicyObjective


def broken(how: str, cfg: Config) -> Trace | None:
    """As `recipes.proof.rank.on_rank`, on a rank where `how` (a function of this file) has been done."""
    globals()[how]()
    return on_rank(cfg, traffic=False)


def _around(owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replaces owner.name by `change(original, *args)`."""
    original = getattr(owner, name)
    setattr(owner, name, wraps(original)(lambda *args, **kwargs: change(original, *args, **kwargs)))


def nothing() -> None:
    """The control: a rank started this way passes."""


def norm_left_unreduced() -> None:
    """One replicated norm keeps each tensor rank's part of its gradient."""

    def without_one(finish: Any, model: ParallelModel) -> None:
        left_out = model.shards["layers.3.input_layernorm.weight"].parameter
        model.replicated = [s for s in model.replicated if s.parameter is not left_out]
        finish(model)

    _around(ParallelModel, "finish", without_one)


class _SharedKeyUnsummed(torch.autograd.Function):
    """As `enter` without sequence parallelism, but the last `width` columns keep this rank's heads' gradient alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, width: int, group: Any) -> Tensor:
        ctx.width, ctx.group = width, group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        own = grad_outputs[0][..., -ctx.width :].clone()
        summed = grad_outputs[0].clone()
        dist.all_reduce(summed, group=ctx.group)
        summed[..., -ctx.width :] = own
        return summed, None, None


def key_value_down_column_parallel() -> None:
    """The shared key's gradient comes from this tensor rank's heads alone, as with a column-parallel kv_down."""

    def change(enter: Any, x: Tensor, world: Any) -> Tensor:
        if x.shape[-1] == 24:  # tiny: 16 latent and 8 shared
            return _SharedKeyUnsummed.apply(x, 8, world.groups.tp)
        return enter(x, world)

    _around(k3.mla, "enter", change)


def _without_last_start(document_starts: Tensor) -> Tensor:
    """The map without the last document start of each row."""
    starts = document_starts.clone()
    for row in starts:
        if len(where := row.nonzero()):
            row[where[-1]] = False
    return starts


def convolution_leaks() -> None:
    """The inputs handed to the next context rank are not masked by the documents that begin among them."""
    _around(k3.kda, "last_inputs", lambda last, x, past, starts, state: last(x, past, None, state))


def kda_leaks() -> None:
    def change(kda: Any, *args: Any, document_starts: Tensor, **options: Any) -> Any:
        return kda(*args, document_starts=_without_last_start(document_starts), **options)

    _around(k3.kda, "kda", change)


def mla_leaks() -> None:
    def change(attention: Any, *args: Any, document_starts: Tensor, **options: Any) -> Any:
        return attention(*args, document_starts=_without_last_start(document_starts), **options)

    _around(k3.builder, "attention", change)


def recomputed() -> None:
    """Every feed-forward part is computed again in the backward pass: must change nothing."""

    def change(forward: Any, layer: LatentMoE, x: Tensor, context: Any) -> Tensor:
        return checkpoint(forward, layer, x, context, use_reentrant=False)

    _around(LatentMoE, "forward", change)


def counted_twice_by_recomputation() -> None:
    """As `recomputed`, with counts taken in the forward pass."""
    recomputed()

    def change(observe: Any, balancer: Balancer, scores: Tensor, *rest: Any) -> Tensor:
        balancer.count(scores.detach(), *rest)
        return scores

    _around(Balancer, "observe", change)


def padding_counted() -> None:
    _around(Stage, "_context", lambda make, *args: replace(make(*args), counted=None))


def divided_by_data_ranks() -> None:
    """Gradients are averaged over the ranks that replicate them, as megatron-core does where it is not told otherwise."""

    def change(init: Any, model: ParallelModel, *args: Any) -> None:
        init(model, *args)
        for group in (*model.ddps[0].bucket_groups, *model.ddps[0].expert_parallel_bucket_groups):
            for bucket in group.buckets:
                bucket.gradient_scaling_factor = 1 / model.world.groups.dp_cp.size()

    _around(ParallelModel, "__init__", change)


def replica_moves() -> None:
    """One rank's copy of a norm is one rounding off after a step."""

    def change(sync: Any, shards: Shards) -> None:
        sync(shards)
        if dist.get_rank() == dist.get_world_size() - 1:
            weight = shards["norm.weight"].parameter.data
            weight[0] = torch.nextafter(weight[0], weight[0] + 1)

    _around(Shards, "sync", change)


def row_resent() -> None:
    """The last stage's bank holds its first row once as kept and once as arrived."""

    def change(receive: Any, rows: RowBank, stage: int, payload: Tensor) -> Any:
        prefix, bank = receive(rows, stage, payload)
        return prefix, (*bank, bank[0]) if stage == rows.plan.stages - 1 else bank

    _around(RowBank, "receive", change)


def row_returned_by_two_stages() -> None:
    """Where a kept row came in, its readers' gradients are returned twice: the forward pass is right."""

    def change(add_to: Any, kept: Any, gradient: Tensor) -> Tensor:
        readers = list(kept.readers)
        total = add_to(kept, gradient)
        kept.readers.extend(readers)
        return add_to(kept, total)

    _around(parallel.rows._Kept, "add_to", change)


def row_kept_unreturned() -> None:
    """The gradients of later readers of a kept row are lost: the forward pass is right."""
    _around(parallel.rows._Kept, "add_to", lambda add_to, kept, gradient: gradient)


def rows_one_micro_batch_late() -> None:
    """A rank's later stages read the kept rows of the micro-batch before."""
    before: dict[int, list[Tensor]] = {}

    def change(receive: Any, rows: RowBank, stage: int, payload: Tensor) -> Any:
        kept = rows._kept.get(rows.micro_batch, [])
        if kept:
            own = [entry.row for entry in kept]
            for entry, late in zip(kept, before.get(stage, own)):
                entry.row = late
            before[stage] = own
        return receive(rows, stage, payload)

    _around(RowBank, "receive", change)


def embedding_copy_unsummed() -> None:
    """The two ends of the pipeline keep their own part of the embedding's gradient."""

    def change(finish: Any, model: ParallelModel) -> None:
        model.at_both_ends = []
        finish(model)

    _around(ParallelModel, "finish", change)


def own_denominators() -> None:
    """Each data rank divides by its own counted tokens."""
    own = lambda _, objective, batches: sum((b.times * b.loss_mask[0]).sum().reshape(1) for b in batches)
    _around(PolicyObjective, "denominators", own)


def times_of_the_first_stretch() -> None:
    """Context ranks read how often the first one's tokens were drawn."""

    def change(share: Any, objective: Any, losses: Tensor, denominators: Tensor, batch: Any) -> Any:
        cp = objective.world.groups.cp.size()
        return share(objective, losses, denominators, replace(batch, times=batch.times.chunk(cp, 1)[0].repeat(1, cp)))

    _around(PolicyObjective, "share", change)


def advantages_of_the_first_stretch() -> None:
    """Context ranks read the advantages of the first one's tokens."""

    def change(share: Any, objective: Any, losses: Tensor, denominators: Tensor, batch: Any) -> Any:
        cp = objective.world.groups.cp.size()
        first = batch.advantage.chunk(cp, 1)[0]
        return share(objective, losses, denominators, replace(batch, advantage=first.repeat(1, cp)))

    _around(PolicyObjective, "share", change)


def mismatch_summed() -> None:
    """The largest difference is summed over the ranks, as the other numbers are."""
    _reduced(lambda reduce, tensor, op, group: reduce(tensor, group=group))


def mismatch_of_own_tokens() -> None:
    _reduced(lambda reduce, tensor, op, group: None if op == dist.ReduceOp.MAX else reduce(tensor, group=group))


def _reduced(change: Callable[..., Any]) -> None:
    """Changes the reductions of what the policy's loss reports."""

    class Changed:
        ReduceOp = dist.ReduceOp

        @staticmethod
        def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
            change(dist.all_reduce, tensor, op, group)

    recipes.rl.objective.dist = Changed  # type: ignore[assignment]
