"""`k3 distill`: on-policy distillation of several experts into one student, in the loop of RL (recipes/rl)."""

from __future__ import annotations

from parallel.world import World
from recipes.assemble import Parts
from recipes.config import Config
from recipes.errors import UserError
from recipes.phases import rl
from recipes.rl.config import Effort, teachers
from recipes.rl.rollouts import Teach
from recipes.rl.teachers import Teachers


class Phase(rl.Phase):
    """The student answers; the expert of the prompt's domain and effort gives each token its advantage."""

    def __init__(self, cfg: Config, world: World):
        try:
            self.experts = teachers(cfg.distill)
        except ValueError as error:
            raise UserError(f"distill.teachers: {error}") from None
        super().__init__(cfg, world)

    def efforts(self) -> dict[str, tuple[Effort, ...]]:
        domains = {teacher.domain for teacher in self.experts}
        return {domain: tuple(t.effort for t in self.experts if t.domain == domain) for domain in domains}

    def teach(self, parts: Parts) -> Teach:
        return Teachers(self.experts, self.cfg, self.world, self.dialogue)
