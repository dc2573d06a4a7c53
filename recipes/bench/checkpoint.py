"""`k3 bench checkpoint`: saving and loading by parallel/checkpoint.py, by megatron-core's dist_checkpointing and by
torch.distributed.checkpoint, of the same tensors, in two processes of this machine, in turns.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parallel.local import Helper
from recipes.checkpoint_sides import LAYER, RANKS, ROWS
from recipes.console import say
from recipes.errors import UserError
from recipes.summary import versions

ROUNDS = 4  # of which each side comes first in one
LIMIT = 1.1  # times megatron-core's time
STALL = 0.2  # of a synchronous save
SIDES = {
    "ours": "parallel/checkpoint.py",
    "megatron": "megatron-core",
    "torch": "torch.distributed.checkpoint",
    "verified": "megatron-core, verify_integrity",
}
COLUMNS = {"save": "save", "load": "load", "disk": "load from disk"}


def run(gib: str = "1", folder: str = ".") -> None:
    """Prints medians, ratios and the asynchronous stall for `gib` GiB of float32 a rank, written to files below `folder` and
    removed. Raises UserError where that is no size, no folder, or more than fits.
    """
    layers, home = layers_of(gib), Path(folder).absolute()
    if not home.is_dir():
        raise UserError(f"folder={folder}: there is no such folder; name one on the disk that is to be measured")
    files = (len(SIDES) + 2) * RANKS * layers * LAYER  # of one round
    if files > (free := shutil.disk_usage(home).free):
        raise UserError(
            f"gib={gib}: takes {files / 2**30:.1f} GiB of disk, and {home} has {free / 2**30:.1f}; give less, or a folder="
        )
    work = tempfile.mkdtemp(prefix="bench-checkpoint-", dir=home)
    try:
        with Helper() as helper:
            measured = helper.run_ranks("recipes.checkpoint_sides:on_rank", RANKS, work, layers, ROUNDS, timeout=7200.0)[0]
        for line in table(measured, layers):
            say(line)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def layers_of(gib: str) -> int:
    """How many of recipes.checkpoint_sides' layers, of 1/16 GiB a rank, are nearest to `gib`."""
    try:
        size = float(gib)
    except ValueError:
        size = math.nan
    if not LAYER / 2**30 <= size <= 1024:
        raise UserError(f"gib={gib}: is the GiB of state a rank, a number from {LAYER / 2**30:g} to 1024; give gib=1")
    return round(size * 2**30 / LAYER)


def table(measured: dict[str, Any], layers: int) -> Iterator[str]:
    """The lines to print of what recipes.checkpoint_sides:on_rank has measured."""
    times: dict[tuple[str, str], list[float]] = measured["times"]
    middle = {key: statistics.median(values) for key, values in times.items()}
    facts = {**versions(), "threads": measured["threads"], "cores": os.cpu_count()}
    yield "versions: " + ", ".join(f"{name} {value}" for name, value in facts.items())
    yield (
        f"{layers * LAYER / 2**30:.3g} GiB of float32 a rank in {layers * len(ROWS)} matrices, {RANKS} ranks; medians and ranges "
        f"of {len(times['save', 'ours'])} rounds in turns, in seconds; the machine's load at the end: {os.getloadavg()[0]:.1f}"
    )
    yield f"{'':<32}" + "".join(f"{title:>26}" for title in COLUMNS.values()) + f"{'MB on disk':>12}"
    for side, name in SIDES.items():
        cells = (f"{middle[what, side]:.2f} ({min(t):.2f} to {max(t):.2f})" for what in COLUMNS for t in [times[what, side]])
        yield f"{name:<32}" + "".join(f"{cell:>26}" for cell in cells) + f"{measured['bytes'][side] / 1e6:>12,.1f}"
    yield "  load: out of the page cache, right after saving; load from disk: after the system was asked to forget the files (a"
    yield "  virtual disk may have a cache of its own). All sides flush their files. Ours reads them back and compares"
    yield "  when saving, and checks XXH3 sums before it loads; megatron-core checks (SHA-256) with verify_integrity alone"
    for what, title in COLUMNS.items():
        ours = middle[what, "ours"]
        ratio = ours / middle[what, "megatron"]
        yield (
            f"{title}: ours / megatron-core {ratio:.2f} ({_verdict(ratio, LIMIT)}), / torch {ours / middle[what, 'torch']:.2f}, "
            f"/ megatron-core with verify_integrity {ours / middle[what, 'verified']:.2f}"
        )
    for side in ("ours", "torch"):
        stall, first = middle["stall", side], times["first stall", side][0]
        part = stall / middle["save", side]
        judged = f" ({_verdict(part, STALL)})" if side == "ours" else ""
        yield (
            f"{SIDES[side]}, asynchronous: waits {stall:.3f} s ({first:.3f} the first time), {part:.2f} of a save{judged}; "
            f"all is on disk after {middle['total', side]:.2f} s, and matrix products run at "
            f"{middle['busy', side] / middle['quiet', side]:.2f} of their speed until then"
        )


def _verdict(value: float, limit: float) -> str:
    return f"within {limit:g}" if value <= limit else f"ABOVE {limit:g}"
