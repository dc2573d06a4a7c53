"""`k3 bench length`: what a longer row costs. One training step of the nano model, or a forward pass, in a process of its own."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from recipes.console import say
from recipes.errors import UserError

TRAINED = (1024, 4096, 16384)  # tokens of the one row of a step
SCORED = (32768, 65536)  # of a forward pass, where a step would take too long
CHUNK = 1024  # activations.head_chunk
WARM = 256  # tokens of the step before: what is allocated once is not the row's


@dataclass(frozen=True)
class Cost:
    length: int
    trained: bool  # else a forward pass alone
    before: int  # bytes of the process when everything but the row is there
    peak: int  # the most it had
    seconds: float
    loss: float

    @property
    def per_token(self) -> float:
        return (self.peak - self.before) / self.length


def run(lengths: str = "") -> int:
    """Prints a line a length; 1 where a loss is not finite or memory grows faster than the row, by more than a quarter.

    `lengths`: "1024,4096", of training steps alone. Raises UserError where they are not numbers.
    """
    jobs = [(length, True) for length in _numbers(lengths)] if lengths else []
    jobs = jobs or [*((n, True) for n in TRAINED), *((n, False) for n in SCORED)]
    say(f"model=nano, fp32, one row, activations=full activations.head_chunk={CHUNK}; memory above what the process begins with")
    say(f"{'tokens':>8}  {'pass':<8} {'peak MiB':>9} {'KiB a token':>12} {'seconds':>8}  loss")
    costs = []
    for length, trained in jobs:
        cost = measured(length, trained)
        costs.append(cost)
        say(
            f"{length:>8}  {'training' if trained else 'forward':<8} {(cost.peak - cost.before) / 2**20:>9,.0f} "
            f"{cost.per_token / 1024:>12.1f} {cost.seconds:>8.1f}  {cost.loss:.4f}"
        )
    return int(not all(math.isfinite(cost.loss) for cost in costs) or not linear(costs))


def linear(costs: Sequence[Cost]) -> bool:
    """Whether no longer row takes more bytes a token than a shorter one of the same kind, but for a quarter."""
    for trained in (True, False):
        each = [cost.per_token for cost in sorted(costs, key=lambda c: c.length) if cost.trained is trained]
        if any(after > 1.25 * before for before, after in pairwise(each)):
            return False
    return True


def measured(length: int, trained: bool) -> Cost:
    """In a fresh process, with this one's environment."""
    words = [sys.executable, "-m", "recipes.bench.length", str(length), "training" if trained else "forward"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    if done.returncode:
        raise RuntimeError(f"a row of {length} tokens:\n{done.stderr}")
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def cost(length: int, trained: bool) -> Cost:
    """In this process, whose peak must not have been higher before."""
    import torch

    import k3
    import parallel
    from data.batch import Batch, StepBatch
    from k3.activations import full
    from optim.config import OptimConfig
    from recipes.assemble import assemble
    from recipes.objective import heldout_loss
    from recipes.trainer import Trainer

    draw = torch.Generator().manual_seed(0)

    def row(tokens: int) -> Batch:
        ids = torch.randint(config.vocab_size, (1, tokens + 1), generator=draw)
        starts = torch.zeros(1, tokens, dtype=torch.bool)
        starts[:, 0] = True
        mask = torch.ones(1 + config.mtp_layers, 1, tokens, dtype=torch.bool)
        return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), starts, mask)

    class Rows:
        position = 0

        def __next__(self) -> StepBatch:
            return StepBatch([row(lengths.pop(0))], 0, 1)

    config, world = k3.preset("nano"), parallel.start()
    activations = full()
    activations.head_chunk = CHUNK
    try:
        parts = assemble(config, OptimConfig(), world, dtype=torch.float32, seed=0, steps=10, activations=activations)
        lengths = [WARM, length]
        trainer = Trainer(parts.model, parts.optimizer, Rows(), parts.objective)
        trainer.module.train()
        if trained:
            trainer.train_step()
        else:
            heldout_loss(parts.model, [row(WARM)])
        _trim()
        before, began = _memory("VmRSS"), time.perf_counter()
        loss = trainer.train_step().losses[0] if trained else heldout_loss(parts.model, [row(length)])
        return Cost(length, trained, before, _memory("VmHWM"), time.perf_counter() - began, loss)
    finally:
        parallel.stop()


def _trim() -> None:
    """Gives what was freed back to the system: the row would fill it, and seem to cost less the shorter it is."""
    with contextlib.suppress(OSError, AttributeError):  # a C library that cannot
        ctypes.CDLL(None).malloc_trim(0)


def _memory(name: str) -> int:
    """Bytes that the kernel counts for this process: VmRSS now, VmHWM at most. Unlike getrusage's, not the parent's before."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}: this benchmark needs Linux")


def _numbers(lengths: str) -> list[int]:
    try:
        found = [int(word) for word in lengths.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise UserError(f"lengths={lengths}: takes numbers of tokens with commas between them, like lengths=1024,4096")
    return found


if __name__ == "__main__":
    print(json.dumps(asdict(cost(int(sys.argv[1]), sys.argv[2] == "training"))))
