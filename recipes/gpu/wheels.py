"""Prints the packages beside torch that `make gpu-check` imports, pinned as in constraints.txt, for `pip wheel`."""

from __future__ import annotations

import sys
from pathlib import Path

# what megatron-core and the checks import for sure; wandb, hydra and tokenizers belong to verbs that the checks do not run
PACKAGES = ("absl-py", "einops", "emerging-optimizers", "fla-core", "megatron-core", "numpy", "packaging", "safetensors")


def pinned(constraints: Path) -> list[str]:
    """`name==version` of every package. Raises KeyError for one that is not pinned."""
    lines = [line for line in constraints.read_text().splitlines() if "==" in line and not line.startswith("#")]
    versions = dict(line.split("==", 1) for line in lines)
    return [f"{name}=={versions[name]}" for name in PACKAGES]


if __name__ == "__main__":
    print(*pinned(Path(__file__).parents[2] / "constraints.txt"))
    sys.exit(0)
