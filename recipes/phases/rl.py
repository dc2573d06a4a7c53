"""`k3 rl`: group-sampled policy gradient on tasks whose answers a program can check (recipes/rl)."""

from __future__ import annotations

from data.tasks import Tasks
from k3 import Engine
from k3.construct import unwrap
from parallel.world import World
from recipes.assemble import Parts
from recipes.config import Config
from recipes.dialogue import EVERY, Dialogue
from recipes.exam import Exam, Exams
from recipes.rewards.judge import Judge
from recipes.rl.callbacks import RolloutMetrics
from recipes.rl.config import Effort
from recipes.rl.objective import PolicyObjective
from recipes.rl.rollouts import Rollouts, Teach
from recipes.run_folder import RunFolder
from recipes.tokens import tokenizer_of
from recipes.trainer import Callback, Trainer


class Phase:
    """Samples answers with the weights that are trained, judges them, and reinforces what was better than its group."""

    lines: tuple[str, ...] = ()

    def __init__(self, cfg: Config, world: World):
        self.cfg, self.world = cfg, world
        self.tokenizer, digest = tokenizer_of(cfg, world)
        self.tasks = Tasks(cfg.tasks)
        self.judge = Judge(cfg.rewards, self.tasks.rewards())
        self.dialogue = Dialogue(self.tasks, self.tokenizer, self.judge, cfg.data.chat.mode, self.efforts())
        self.key = f"{self.tasks.fingerprint}-{digest}"

    def efforts(self) -> dict[str, tuple[Effort, ...]]:
        """What prompts of each domain state of effort."""
        return {EVERY: (self.cfg.rl.effort,)}

    def trainer(self, parts: Parts, position: int) -> Trainer:
        cfg, r = self.cfg, self.cfg.rl
        self.engine = Engine(unwrap(parts.model.module), slots=r.slots)
        self.rollouts = Rollouts(
            r, cfg.data, self.world, self.dialogue, self.engine,
            seed=cfg.run.seed, steps=cfg.run.steps, position=position, teach=self.teach(parts),
        )  # fmt: skip
        self.rollouts.check()
        limit = cfg.distill.limit
        objective = PolicyObjective((1.0,), self.world, low=r.low, high=r.high, tau=r.tau, limit=limit)
        return Trainer(parts.model, parts.optimizer, self.rollouts, objective, keeps=self.rollouts)

    def teach(self, parts: Parts) -> Teach | None:
        return None

    def measures(self, folder: RunFolder) -> list[Callback]:
        own: list[Callback] = [RolloutMetrics(self.rollouts, folder.path, self.judge)]
        if self.cfg.exam.enabled is False:
            return own
        exam = Exam(self.dialogue, self.world, self.tasks.heldout(), self.cfg.exam)
        return [*own, Exams(exam, self.engine, folder.path, self.cfg.run.eval_every)]

    def finale(self, folder: RunFolder) -> list[Callback]:
        return []
