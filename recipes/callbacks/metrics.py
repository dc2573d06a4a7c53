"""metrics.jsonl: one object a line, flushed at every step, whatever else happens to the process."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Set
from pathlib import Path
from typing import IO, Any

from recipes.trainer import Callback, StepResult, Trainer

DETAILED = 200  # about this many steps of a run carry the values of every expert, head and matrix
DETAIL = ("load/experts", "update_rms/heads", "update_rms/mean/")


def scalars(result: StepResult, trainer: Trainer) -> dict[str, Any]:
    """What every step reports, beside what other callbacks add."""
    report, done = result.report, trainer.progress
    return {
        "step": result.step,
        "loss": result.losses[0],
        **{f"mtp_loss/{depth}": loss for depth, loss in enumerate(result.losses[1:], 1)},
        "lr": report.lr,
        "grad_norm": report.grad_norm,
        "clip_coefficient": report.clip_coefficient,
        "skipped": report.skipped,
        "max_logit": report.max_logit,
        "clipped_heads": report.clipped_heads,
        "tokens": done.tokens,
        "seconds": result.seconds,
        "tokens_per_second": result.tokens / result.seconds,
        "train_seconds": done.train_seconds,
    }


def update_rms(result: StepResult, per_head: Set[str]) -> dict[str, Any]:
    """Root mean square of Muon's updates, learning rate included: over all blocks, per parameter, and per head."""
    rms = result.report.update_rms
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


class Metrics(Callback):
    """Completes `result.metrics` and appends it to a file. `per_head`: names of the parameters whose blocks are heads."""

    def __init__(self, path: Path, per_head: Set[str] = frozenset()):
        self.path = path
        self.per_head = per_head
        self.file: IO[str] | None = None

    def start(self, trainer: Trainer) -> None:
        self.file = self.path.open("a")

    def step(self, trainer: Trainer, result: StepResult) -> None:
        assert self.file is not None
        result.metrics = scalars(result, trainer) | update_rms(result, self.per_head) | result.metrics
        if result.step % max(1, trainer.steps // DETAILED):
            result.metrics = {key: value for key, value in result.metrics.items() if not key.startswith(DETAIL)}
        record = {key: _json(value) for key, value in result.metrics.items()}
        self.file.write(json.dumps(record, allow_nan=False) + "\n")
        self.file.flush()

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
