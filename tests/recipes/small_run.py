"""A small run for tests: a made-up language of a few words, the tiny model, short sequences, everything on the CPU."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

from parallel import checkpoint, checkpoint_index
from parallel.checkpoint_tensors import Tensors
from recipes.compose import compose
from recipes.pretrain import pretrain

SIZES = ("model=tiny", "data.seq_length=32", "data.batch_size=4", "data.micro_batch_size=2", "data.heldout_tokens=300")


def write_corpus(folder: Path, seed: int = 0) -> Path:
    """60 short files; half the words follow from the word before, so there is something to learn."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(40)]
    follows = {word: rng.choice(words) for word in words}
    folder.mkdir(parents=True)
    for number in range(60):
        text, word = [], rng.choice(words)
        for _ in range(200):
            text.append(word)
            word = follows[word] if rng.random() < 0.5 else rng.choice(words)
        (folder / f"{number:02}.txt").write_text(" ".join(text) + "\n")
    return folder


def words(home: Path, run: str, *more: str) -> list[str]:
    """The command line of a small run in `home/run`, on the corpus of `home`, without W&B unless `more` says so."""
    where = (f"data.corpus={home / 'corpus'}", f"data.cache={home / 'cache'}", f"run.dir={home / run}", "wandb.mode=disabled")
    return [*SIZES, *where, *more]


def do(home: Path, run: str, *more: str) -> tuple[int, Path]:
    """Runs it in this process: (exit code, run folder)."""
    return pretrain(compose(words(home, run, *more))), home / run


def resume(folder: Path, *more: str) -> int:
    return pretrain(compose([f"run.resume={folder}", "wandb.mode=disabled", *more]))


def metrics(folder: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def curve(folder: Path) -> list[tuple[int, float, float | None, float, dict]]:
    """What must not depend on how often a run was stopped."""
    return [(r["step"], r["loss"], r.get("heldout_loss"), r["grad_norm"], r.get("load/experts")) for r in metrics(folder)]


def stored(path: Path, part: str = "") -> dict[str, torch.Tensor]:
    """The whole tensors of a checkpoint whose names begin with `part`."""
    index = checkpoint_index.read(path, checkpoint.facts(path)["files"])
    tensors = Tensors(path, index)
    return {name: tensors.read(name) for name in index.state_dict_metadata if name.startswith(part)}


def same_checkpoint(one: Path, other: Path, *, but: str | None = None) -> None:
    """Asserts that two checkpoints hold the same tensors, bit for bit, but those of the provider `but`."""
    first, second = stored(one), stored(other)
    if but is not None:
        first, second = ({k: t for k, t in of.items() if not k.startswith(but + ".")} for of in (first, second))
    assert first.keys() == second.keys() and first
    for key, tensor in first.items():
        assert tensor.dtype == second[key].dtype and tensor.shape == second[key].shape, key
        a, b = tensor.reshape(-1).view(torch.uint8), second[key].reshape(-1).view(torch.uint8)
        assert torch.equal(a, b), f"{key} differs"
