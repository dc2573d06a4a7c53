"""What tests have each of several ranks do."""

from __future__ import annotations

from typing import Any

import parallel
from parallel.config import ParallelConfig
from recipes.compose import compose
from recipes.rl.objective import PolicyObjective
from recipes.rl.rollouts import Rollouts
from recipes.trainer import Trainer
from recipes.training import train


def reported() -> list[float]:
    from tests.recipes.rl.test_objective import HIGH, LIMIT, LOW, TAU, batch_of, losses_of

    world = parallel.start(ParallelConfig(dp=2), "cpu")
    o = PolicyObjective((1.0,), world, low=LOW, high=HIGH, tau=TAU, limit=LIMIT)
    logits, batch = batch_of(1 + world.data_rank)
    return o.total([o.share(losses_of(logits, batch), o.denominators([batch]), batch)[1]])


def phase(verb: str, words: list[str], said: str) -> dict[str, Any]:
    """`k3 VERB words...` on this rank with an untaught model's rewards and ends: (exit code, of each step what was told)."""
    import os
    from pathlib import Path

    from tests.recipes.small_phases import untaught

    untaught()
    file = Path(said).open("a")
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    steps: list[Any] = []
    trained: list[Trainer] = []
    batch, run = Rollouts._batch, Trainer.run

    def told(self: Rollouts, sampled: Any, index: int) -> Any:
        steps.append([(list(one.prompt), list(one.tokens), one.advantage, one.stale) for one in sampled])
        return batch(self, sampled, index)

    def running(self: Trainer, many: int) -> bool:
        trained.append(self)
        return run(self, many)

    Rollouts._batch, Trainer.run = told, running  # type: ignore[method-assign]
    code = train(compose(words, verb))
    return {"code": code, "told": steps, "step": trained[0].progress.step if trained else None}
