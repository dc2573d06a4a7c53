"""`k3 distill`: on-policy distillation of several experts into one student, in the loop of RL (recipes/rl)."""

from __future__ import annotations

from data.tasks import folder
from parallel.world import World
from recipes.assemble import Parts
from recipes.config import Config
from recipes.errors import UserError, shown
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
        if cfg.tasks.folder is not None:  # generators' domains are known before (recipes/phases/rules.py)
            self._check(list(dict.fromkeys(task.domain for task in folder.read(cfg.tasks.folder))))
        self.teachers = Teachers(self.experts, cfg, world, self.dialogue)
        self.lines = (*self.lines, *self.teachers.lines)

    def _check(self, of_folder: list[str]) -> None:
        taught = {expert.domain for expert in self.experts}
        if without := [domain for domain in of_folder if domain not in taught]:
            raise UserError(
                f"distill.teachers={shown(self.cfg.distill.teachers)}: no expert is for {', '.join(without)}, of which "
                f"tasks.folder={self.cfg.tasks.folder} has tasks; give one each"
            )
        if idle := sorted(taught - {*of_folder, *self.cfg.tasks.generators}):
            raise UserError(
                f"distill.teachers={shown(self.cfg.distill.teachers)}: there are no tasks of {', '.join(idle)}; leave their "
                "experts out"
            )

    def efforts(self) -> dict[str, tuple[Effort, ...]]:
        domains = {teacher.domain for teacher in self.experts}
        return {domain: tuple(t.effort for t in self.experts if t.domain == domain) for domain in domains}

    def teach(self, parts: Parts) -> Teach:
        self.teachers.load()
        return self.teachers
