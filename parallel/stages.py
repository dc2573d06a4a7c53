"""How a model is cut into pipeline stages, which rows travel between them, and how a step's micro-batches are grouped: plain
arithmetic, read before torch is.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from parallel.config import ParallelConfig, ParallelError


def stage_count(config: ParallelConfig) -> int:
    return config.pp * config.vpp


def split_layers(layers: int, config: ParallelConfig) -> list[range]:
    """The layers of each of the pp * vpp stages, in the model's order: `config.split`, or as even as it can be.

    Stage g runs on pipeline rank g % pp. What an even split leaves over goes to the stages before the last, which has the head.
    Raises ParallelError where `split` does not fit.
    """
    if config.split is None:
        count = stage_count(config)
        sizes = [layers // count] * count
        for i in range(layers % count):
            sizes[(count - 2 - i) % count] += 1
    else:
        sizes = config.split
    if wrong := _misfit(layers, config, sizes):
        raise ParallelError(wrong)
    return [range(first, last) for first, last in pairwise(accumulate(sizes, initial=0))]


def _misfit(layers: int, config: ParallelConfig, sizes: list[int]) -> str | None:
    count = stage_count(config)
    if config.split is None:
        if layers >= count:
            return None
        return (
            f"parallel.pp={config.pp} and parallel.vpp={config.vpp}: {count} stages for {layers} layers; give at most {layers} "
            "stages, or a parallel.split whose first or last number is 0"
        )
    typed = f"parallel.split={sizes}".replace(" ", "")
    if len(sizes) != count:
        return f"{typed}: {len(sizes)} numbers for pp * vpp = {config.pp} * {config.vpp} = {count} stages; give one for each"
    if low := [size for size in sizes if size < 0]:
        return f"{typed}: {low[0]} layers; no number may be below 0"
    if sum(sizes) != layers:
        return f"{typed}: adds up to {sum(sizes)}, and the model has {layers} layers; give {layers} in all"
    if empty := [i for i, size in enumerate(sizes, 1) if not size and 1 < i < count]:
        return (
            f"{typed}: number {empty[0]} of {count} is 0; only the first (embedding) and the last (head) stage may have no layers"
        )
    return None


def group_size(config: ParallelConfig, micro_batches: int, fix: str = "give more and smaller ones") -> int:
    """How many micro-batches in a row pass each virtual stage: `config.group`, or pp, or more where a step's last group would
    fall short of pp.

    Raises ParallelError where megatron-core's interleaved schedule cannot run a step of `micro_batches`; `fix` is how its reader
    gets more of them.
    """
    pp = config.pp
    if micro_batches < pp:
        raise ParallelError(
            f"parallel.vpp={config.vpp}: a step has {micro_batches} micro-batch{'es' if micro_batches > 1 else ''}, and virtual "
            f"stages need at least pp = {pp}; {fix}, or parallel.vpp=1"
        )
    if config.group is None:
        return next(g for g in range(pp, micro_batches + 1) if _fits(g, pp, micro_batches))
    if not _fits(config.group, pp, micro_batches):
        fitting = [str(g) for g in range(pp, micro_batches + 1) if _fits(g, pp, micro_batches)]
        raise ParallelError(
            f"parallel.group={config.group}: must lie between pp = {pp} and the {micro_batches} micro-batches of a step, and "
            f"leave none or at least {pp} over; give {' or '.join(fitting)}"
        )
    return config.group


def bubble(config: ParallelConfig, micro_batches: int) -> float:
    """The share of a step in which a pipeline rank waits, if all stages took equally long and nothing else cost time."""
    return (config.pp - 1) / (config.vpp * micro_batches + config.pp - 1)


def _fits(group: int, pp: int, micro_batches: int) -> bool:
    return pp <= group <= micro_batches and not 0 < micro_batches % group < pp


@dataclass(frozen=True)
class RowPlan:
    """Which rows travel between stages and which are kept on a rank; parallel/rows.py carries it out.

    made [C]: rows in the bank when each of the C = pp * vpp stages has run.
    """

    made: tuple[int, ...]
    pp: int

    @property
    def stages(self) -> int:
        return len(self.made)

    def kept(self, stage: int) -> int:
        """Rows that the rank of `stage` has when the stage begins: those of its previous one."""
        return self.made[stage - self.pp] if stage >= self.pp else 0

    def sent(self, stage: int) -> int:
        """Rows that travel from `stage` to the next beside the prefix."""
        return self.made[stage] - self.kept(stage + 1) if stage + 1 < self.stages else 0

    def is_last_of_rank(self, stage: int) -> bool:
        return stage + self.pp >= self.stages
