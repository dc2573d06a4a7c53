"""`k3 inspect PATH`: what a checkpoint, a run's last checkpoint or a published folder holds. No tensor is read."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from k3 import hf
from k3.cards import describe
from parallel.checkpoint_folder import CheckpointError, damages
from parallel.config import ParallelConfig, world_size
from recipes.errors import UserError, shown
from recipes.stored import WEIGHTS, Stored, find


def run(words: Sequence[str]) -> int:
    """Prints it. Raises UserError where the path is neither, and as its readers do."""
    if len(words) != 1:
        raise UserError(f"inspect {' '.join(words)}: give one path, of a run folder, a checkpoint or a published folder")
    path = Path(words[0])
    found = find(path)
    if found is None and not (path / "config.json").is_file():
        raise UserError(f"{path}: neither a run folder, nor a checkpoint, nor a published folder")
    try:
        lines = list(published(path) if found is None else own(Stored(found)))
    except (KeyError, TypeError, AttributeError) as error:  # JSON that was written by somebody else
        raise CheckpointError(f"{found}/state.json is damaged: {type(error).__name__}: {error}") from error
    print("\n".join(lines))
    return 0


def own(stored: Stored) -> Iterator[str]:
    facts = stored.facts
    layout = ParallelConfig(**{key: value for key, value in facts["layout"].items() if key in asdict(ParallelConfig())})
    usual = asdict(ParallelConfig(dp=1, sp=False))
    named = " ".join(f"parallel.{key}={shown(value)}" for key, value in asdict(layout).items() if value != usual[key])
    count = world_size(layout)
    yield f"{stored.path}: a checkpoint of format {facts['format']}, after step {facts['step']}"
    if "progress" in facts:
        yield f"tokens    {facts['progress']['tokens']:,}"
    yield f"written   by {count} process{'es' * (count > 1)}{': ' + named if named else ''}"
    yield f"files     {len(facts['files'])}, {sum(entry['bytes'] for entry in facts['files'].values()):,} bytes"
    for line in damages(stored.path, facts["files"], sums=False):
        yield f"damaged   {line}"
    roles = {name: card.role or "other" for name, card in describe(stored.config).items()} if "model" in facts else {}
    rows: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for name, entry in stored.index.state_dict_metadata.items():
        provider, _, rest = name.partition(".")
        part = f"{provider}: {roles.get(rest, 'buffers')}" if provider == WEIGHTS and roles else provider
        count, dtype = math.prod(entry.size), entry.properties.dtype
        rows[part].append((count, count * dtype.itemsize, str(dtype).removeprefix("torch.")))
    yield from _table({p: (sum(n for n, _, _ in r), sum(b for _, b, _ in r), Counter(d for *_, d in r)) for p, r in rows.items()})


def published(path: Path) -> Iterator[str]:
    there = hf.contents(path)
    yield f"{path}: a published folder{', packed as ' + there.quantised if there.quantised else ''}"
    yield f"weights   {there.parameters:,} parameters, {there.nbytes:,} bytes in {len(there.shards)} files"
    yield from _table({name: (part.parameters, part.nbytes, part.dtypes) for name, part in there.parts.items()})


def _table(parts: dict[str, tuple[int, int, Counter[str]]]) -> Iterator[str]:
    yield f"{'part':<28}{'numbers':>20}{'bytes':>20}  tensors"
    for name, (numbers, size, dtypes) in parts.items():
        yield f"{name:<28}{numbers:>20,}{size:>20,}  " + ", ".join(f"{count} {dtype}" for dtype, count in dtypes.items())
