"""The attributes that megatron-core reads from parameters, set from the cards in one place."""

from __future__ import annotations

from parallel.cards import CardTable, Group, TensorAxis
from parallel.world import World


def mark(table: CardTable, world: World) -> None:
    """Sets `allreduce` (false: reduced over the expert-data ranks), the tensor-parallel attributes, and `shared_embedding` on
    what the first and the last pipeline rank both hold: it gets a bucket of its own, which both cut alike.

    In every layout alike: otherwise megatron-core groups optimizer state differently with and without expert parallelism.
    """
    for card, parameter in table.trained():
        axis = card.placement.tensor
        sharded = axis in (TensorAxis.ROWS, TensorAxis.COLS)
        parameter.allreduce = card.placement.group is Group.DENSE  # type: ignore[attr-defined]
        parameter.tensor_model_parallel = sharded  # type: ignore[attr-defined]
        parameter.partition_dim = {TensorAxis.ROWS: 0, TensorAxis.COLS: 1}.get(axis, -1)  # type: ignore[attr-defined]
        parameter.partition_stride = 1  # type: ignore[attr-defined]
        if card.placement.both_ends and world.config.pp > 1:
            parameter.shared_embedding = True  # type: ignore[attr-defined]
