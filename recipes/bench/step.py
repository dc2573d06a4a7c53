"""`k3 bench step`: tokens/s of whole training steps, optimizer, balancing and weight clip included, at one fixed model."""

from __future__ import annotations

import os
import statistics

import torch

import parallel
from data.batch import Batch, StepBatch
from k3.config import K3Config, KDAConfig, MLAConfig, MoEConfig
from optim.config import OptimConfig
from recipes.assemble import assemble
from recipes.console import say
from recipes.launch import ALLOCATOR
from recipes.summary import versions
from recipes.trainer import Trainer

SEQUENCES, LENGTH = 8, 512
WARM_UP, MEASURED = 2, 5  # steps


def yardstick() -> K3Config:
    """Nine layers of every kind without MTP, about 10.3 M parameters: the size at which step times are compared."""
    return K3Config(
        vocab_size=1024, hidden_size=256, layers=9, dense_size=512, residual_block=3, init_std=0.02,
        kda=KDAConfig(heads=4, head_dim=64),
        mla=MLAConfig(heads=4, q_lora_rank=96, kv_lora_rank=64, nope_dim=64, rope_dim=32, v_dim=64),
        moe=MoEConfig(experts=16, top_k=4, latent_size=128, expert_size=96),
    )  # fmt: skip


class RandomTokens:
    """A stream of uniform random tokens, two documents a row: what a step costs does not depend on what it reads."""

    def __init__(self, vocab_size: int, seed: int = 0):
        self.vocab_size = vocab_size
        self.generator = torch.Generator().manual_seed(seed)
        self.position = 0

    def __iter__(self) -> RandomTokens:
        return self

    def __next__(self) -> StepBatch:
        rows = torch.randint(self.vocab_size, (SEQUENCES, LENGTH + 1), generator=self.generator)
        starts = torch.zeros(SEQUENCES, LENGTH, dtype=torch.bool)
        starts[:, 0] = starts[:, LENGTH // 2] = True
        mask = torch.ones(1, SEQUENCES, LENGTH, dtype=torch.bool)
        mask[:, :, LENGTH // 2 - 1] = False  # the last token of the first document has no target
        self.position += 1
        return StepBatch(
            [Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), starts, mask)], self.position - 1, rows[:, 1:].numel()
        )


def step_seconds(config: K3Config, dtype: torch.dtype, *, warm_up: int = WARM_UP, measured: int = MEASURED) -> list[float]:
    """Seconds of each measured step of SEQUENCES x LENGTH tokens."""
    world = parallel.start()
    try:
        parts = assemble(config, OptimConfig(), world, dtype=dtype, seed=0, steps=warm_up + measured)
        trainer = Trainer(parts.model, parts.optimizer, RandomTokens(config.vocab_size), parts.objective)
        return [trainer.train_step().seconds for _ in range(warm_up + measured)][warm_up:]
    finally:
        parallel.stop()


def run() -> None:
    """Prints the median step time and tokens/s in fp32 and bf16."""
    say(", ".join(f"{name} {value}" for name, value in versions().items()))
    say("allocator: " + (", ".join(f"{n}={os.environ[n]}" for n in ALLOCATOR if n in os.environ) or "as the system has it"))
    for dtype in (torch.float32, torch.bfloat16):
        seconds = statistics.median(step_seconds(yardstick(), dtype))
        tokens = SEQUENCES * LENGTH
        speed = f"{tokens / seconds:,.0f} tokens/s"
        say(f"{str(dtype).removeprefix('torch.'):<9} {seconds:6.3f} s a step of {tokens} tokens: {speed} (median of {MEASURED})")


if __name__ == "__main__":
    run()
