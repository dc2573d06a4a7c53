"""What differs between two finished runs that must have computed the same, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel import checkpoint, checkpoint_index
from parallel.checkpoint_tensors import Tensors
from recipes.run_folder import read_metrics

CLOCK = (
    "seconds",
    "tokens_per_second",
    "train_seconds",
    "checkpoint/",
    "rl/seconds",
)  # metrics that time runs, and those of the saves


def differences(one: Path, other: Path) -> Iterator[str]:
    """Of two run folders: metrics of every step, the last checkpoint's tensors and facts, the exported model."""
    yield from different_metrics(one, other)
    first, second = (checkpoint.latest(path / "checkpoints") for path in (one, other))
    if first is None or second is None:
        yield f"checkpoints: {first} and {second}"
        return
    yield from different_facts(first, second)
    yield from different_tensors(stored(first), stored(second))
    exported = [{file.name: file.read_bytes() for file in (path / "hf").glob("*")} for path in (one, other)]
    if exported[0] != exported[1] or not exported[0]:
        yield "hf: the exported models differ"


def different_metrics(one: Path, other: Path) -> Iterator[str]:
    """All that metrics.jsonl says, losses, gradient norms and the experts' loads among it, but for the times."""
    first, second = (list(read_metrics(path / "metrics.jsonl")) for path in (one, other))
    steps = [[record["step"] for record in records] for records in (first, second)]
    if steps[0] != steps[1]:
        yield f"metrics: steps {steps[0]} and {steps[1]}"
    for a, b in zip(first, second):
        for key in sorted(a.keys() | b.keys()):
            if not key.startswith(CLOCK) and (key not in a or key not in b or a[key] != b[key]):
                yield f"metrics: step {a['step']}: {key}: {a.get(key, 'none')} and {b.get(key, 'none')}"


def different_facts(one: Path, other: Path) -> Iterator[str]:
    """Of two checkpoints: what state.json says beside the times and the files, whose bytes hold names of processes."""
    first, second = (_facts(path) for path in (one, other))
    for key in sorted(first.keys() | second.keys()):
        if first.get(key) != second.get(key):
            yield f"state.json: {key}: {first.get(key)} and {second.get(key)}"


def _facts(path: Path) -> dict[str, Any]:
    facts = {key: value for key, value in checkpoint.facts(path).items() if key not in ("files", "wandb")}
    config = {**facts["config"], "run": {k: v for k, v in facts["config"]["run"].items() if k not in ("dir", "resume")}}
    facts |= {"config": config}  # each run is in a folder of its own
    return facts | {"progress": {key: value for key, value in facts["progress"].items() if key not in CLOCK}}


def stored(path: Path, part: str = "") -> dict[str, Tensor]:
    """The whole tensors of a checkpoint whose names begin with `part`."""
    index = checkpoint_index.read(path, checkpoint.facts(path)["files"])
    tensors = Tensors(path, index)
    return {name: tensors.read(name) for name in index.state_dict_metadata if name.startswith(part)}


def different_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> Iterator[str]:
    """By name, dtype, shape and bits."""
    for name in sorted(one.keys() | other.keys()):
        if name not in one or name not in other:
            yield f"{name}: in one checkpoint alone"
        elif (kinds := [(t.dtype, t.shape) for t in (one[name], other[name])])[0] != kinds[1]:
            yield f"{name}: {kinds[0]} and {kinds[1]}"
        else:
            a, b = (t.reshape(-1).view(torch.uint8) for t in (one[name], other[name]))
            if not torch.equal(a, b):
                yield f"{name} differs"
