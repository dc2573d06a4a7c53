"""metrics.jsonl: one object a line, flushed at every step, whatever else happens to the process."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.together import by_number, gather
from parallel.world import World
from recipes.trainer import Callback, StepResult, Trainer

DETAILED = 200  # about this many steps of a run carry the values of every expert, head and matrix
DETAIL = ("load/experts", "update_rms/heads", "update_rms/mean/")


def scalars(result: StepResult, trainer: Trainer) -> dict[str, Any]:
    """What every step reports, beside what other callbacks add."""
    report, done = result.report, trainer.progress
    return {
        "step": result.step,
        **dict(zip(trainer.objective.names, result.losses)),
        "lr": report.lr,
        "grad_norm": report.grad_norm,
        "clip_coefficient": report.clip_coefficient,
        "skipped": report.skipped,
        **({"skip_reason": report.reason} if report.skipped else {}),
        **({"idle": report.idle} if report.idle is not None else {}),
        "max_logit": report.max_logit,
        "clipped_heads": report.clipped_heads,
        "batch_size": result.sequences,
        "tokens": done.tokens,
        "seconds": result.seconds,
        "tokens_per_second": result.tokens / result.seconds,
        "train_seconds": done.train_seconds,
    }


def update_rms(rms: Mapping[str, Tensor], per_head: Set[str]) -> dict[str, Any]:
    """Root mean square of Muon's updates, learning rate included: over all blocks, per parameter, and per head."""
    if not rms:
        return {}
    return {
        "update_rms/min": min(float(value.min()) for value in rms.values()),
        "update_rms/max": max(float(value.max()) for value in rms.values()),
        **{f"update_rms/mean/{name}": _short(float(value.mean())) for name, value in rms.items()},
        "update_rms/heads": {
            name: [_short(x) for x in value.flatten().tolist()] for name, value in rms.items() if name in per_head
        },
    }


def update_rms_of_all(
    rms: Mapping[str, Tensor], blocks: Mapping[str, Sequence[int]], per_head: Set[str], world: World, *, detailed: bool
) -> dict[str, Any]:
    """The same over the blocks of all ranks, per parameter and head if `detailed`. Every rank must call it.

    blocks: which of a parameter's blocks this rank's values are.
    """
    inf = float("inf")
    lowest = min((float(value.min()) for value in rms.values()), default=inf)
    highest = max((float(value.max()) for value in rms.values()), default=-inf)
    edges = torch.tensor([-lowest, highest], dtype=torch.float64, device=world.device)
    dist.all_reduce(edges, op=dist.ReduceOp.MAX)
    lowest, highest = -edges[0].item(), edges[1].item()
    if lowest > highest:  # Muon updates nothing
        return {}
    found: dict[str, Any] = {"update_rms/min": lowest, "update_rms/max": highest}
    if detailed:
        sums: dict[str, tuple[float, int]] = {}
        for part in gather(world, {name: (float(value.sum()), value.numel()) for name, value in rms.items()}):
            for name, (total, count) in part.items():
                before = sums.get(name, (0.0, 0))
                sums[name] = (before[0] + total, before[1] + count)
        found |= {f"update_rms/mean/{name}": _short(sums[name][0] / sums[name][1]) for name in sorted(sums, key=by_number)}
        heads: dict[str, dict[int, float]] = {}
        own = {name: dict(zip(blocks[name], value.tolist())) for name, value in rms.items() if name in per_head}
        for of_rank in gather(world, own):
            for name, values in of_rank.items():
                heads.setdefault(name, {}).update(values)
        found["update_rms/heads"] = {n: [_short(heads[n][i]) for i in sorted(heads[n])] for n in sorted(heads, key=by_number)}
    return found


class Metrics(Callback):
    """Completes `result.metrics` and, on rank 0, appends it to a file. `per_head`: the parameters whose blocks are heads."""

    def __init__(self, path: Path, per_head: Set[str] = frozenset()):
        self.path = path
        self.per_head = per_head
        self.file: IO[str] | None = None

    def start(self, trainer: Trainer) -> None:
        if trainer.objective.world.rank == 0:
            self.file = self.path.open("a")

    def step(self, trainer: Trainer, result: StepResult) -> None:
        detailed = result.step % max(1, trainer.steps // DETAILED) == 0
        result.metrics = scalars(result, trainer) | self._update_rms(trainer, result, detailed) | result.metrics
        if not detailed:
            result.metrics = {key: value for key, value in result.metrics.items() if not key.startswith(DETAIL)}
        if self.file is not None:
            record = {key: _json(value) for key, value in result.metrics.items()}
            self.file.write(json.dumps(record, allow_nan=False) + "\n")
            self.file.flush()

    def _update_rms(self, trainer: Trainer, result: StepResult, detailed: bool) -> dict[str, Any]:
        world = trainer.objective.world
        if world.size == 1:
            return update_rms(result.report.update_rms, self.per_head)
        if result.report.skipped or result.report.idle is not None:
            return {}
        return update_rms_of_all(result.report.update_rms, trainer.optimizer.muon.blocks, self.per_head, world, detailed=detailed)

    def close(self, trainer: Trainer) -> None:
        if self.file is not None:
            self.file.close()


def flat(metrics: dict[str, Any]) -> Iterator[tuple[str, float | int | bool]]:
    """The finite numbers among the metrics: what a dashboard plots."""
    for key, value in metrics.items():
        if isinstance(value, (int, float)) and math.isfinite(value):
            yield key, value


def _json(value: Any) -> Any:
    """JSON has no NaN and no infinity: both become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _short(value: float) -> float:
    return float(f"{value:.4g}")
