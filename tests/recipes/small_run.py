"""A small run for tests: a made-up language of a few words, the tiny model, short sequences, everything on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recipes.compose import compose
from recipes.faults.corpus import write_corpus
from recipes.faults.same import different_tensors, stored
from recipes.training import train

__all__ = ["curve", "do", "metrics", "resume", "same_checkpoint", "stored", "words", "write_corpus"]

SIZES = ("model=tiny", "data.seq_length=32", "data.batch_size=4", "data.micro_batch_size=2", "data.heldout_tokens=300")


def words(home: Path, run: str, *more: str) -> list[str]:
    """The command line of a small run in `home/run`, on the corpus of `home`, without W&B unless `more` says so."""
    where = (f"data.corpus={home / 'corpus'}", f"data.cache={home / 'cache'}", f"run.dir={home / run}", "wandb.mode=disabled")
    return list({word.partition("=")[0]: word for word in (*SIZES, *where, *more)}.values())  # the last one of a key


def do(home: Path, run: str, *more: str) -> tuple[int, Path]:
    """Runs it in this process: (exit code, run folder)."""
    return train(compose(words(home, run, *more))), home / run


def resume(folder: Path, *more: str) -> int:
    return train(compose([f"run.resume={folder}", "wandb.mode=disabled", *more]))


def metrics(folder: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def curve(folder: Path) -> list[tuple[int, float, float | None, float, dict]]:
    """What must not depend on how often a run was stopped."""
    return [(r["step"], r["loss"], r.get("heldout_loss"), r["grad_norm"], r.get("load/experts")) for r in metrics(folder)]


def same_checkpoint(one: Path, other: Path, *, but: str | None = None) -> None:
    """Asserts that two checkpoints hold the same tensors, bit for bit, but those of the provider `but`."""
    first, second = stored(one), stored(other)
    if but is not None:
        first, second = ({k: t for k, t in of.items() if not k.startswith(but + ".")} for of in (first, second))
    assert first
    assert list(different_tensors(first, second)) == []
