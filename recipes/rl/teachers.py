"""What experts say of sampled tokens: each trajectory's log-probabilities under the teacher of its domain and effort."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

import k3
from data.config import micro_batch
from parallel.together import gather
from parallel.world import World
from recipes.assemble import DTYPES
from recipes.config import Config
from recipes.dialogue import Dialogue
from recipes.errors import UserError
from recipes.initial import Initial, initial
from recipes.objective import to_device
from recipes.rl.batch import Sampled, collate, pack, set_baselines
from recipes.rl.config import Effort, Teacher
from recipes.rl.rollouts import Told


class Teachers:
    """Sets `teacher` and `baseline` of finished groups' trajectories. All experts' weights are in memory, cut and rounded as the
    student's are.
    """

    def __init__(self, teachers: Sequence[Teacher], cfg: Config, world: World, dialogue: Dialogue):
        """Opens them. Raises UserError for a path that holds no model, or another than the student's."""
        self.cfg, self.world, self.dialogue = cfg, world, dialogue
        self.teachers = teachers
        self.models: dict[tuple[str, Effort], k3.Model] = {}
        self._opened: dict[str, Initial] = {}
        for teacher in teachers:
            if teacher.path not in self._opened:
                self._opened[teacher.path] = self._open(teacher)

    @property
    def lines(self) -> tuple[str, ...]:
        """Which expert judges what."""
        of = lambda teacher: teacher.domain + (f" at effort {teacher.effort.name}" if teacher.effort is not Effort.none else "")
        return tuple(f"teacher of {of(teacher)}: {teacher.path}" for teacher in self.teachers)

    def _open(self, teacher: Teacher) -> Initial:
        try:
            weights = initial(teacher.path, self.world)
            assert weights is not None
            weights.check(self.cfg.model)
        except UserError as error:
            text = str(error).replace(f"run.init={Path(teacher.path)}", teacher.path)
            text = text.removesuffix("\nleave the model's keys out: run.init brings them")
            raise UserError(f"distill.teachers: {teacher.domain}: {text}; an expert is a model of the student's shape") from error
        return weights

    def load(self) -> None:
        """Makes their models."""
        cfg = self.cfg
        made: dict[str, k3.Model] = {}
        for path, weights in self._opened.items():
            model = k3.build(
                cfg.model,
                self.world,
                dtype=DTYPES[cfg.precision.name],
                activations=cfg.activations,
                qat=cfg.qat,
                draw_values=False,
            )
            weights.weights(model)
            made[path] = model.eval()
        self.models = {(teacher.domain, teacher.effort): made[teacher.path] for teacher in self.teachers}

    def __call__(self, told: Sequence[Told]) -> None:
        """Every rank must call it with the same groups."""
        of_model: dict[tuple[str, Effort], list[Sampled]] = {}
        for group in told:
            key = (group.domain, group.effort)
            if key not in self.models:
                known = ", ".join(f"{domain}/{effort.name}" for domain, effort in self.models)
                asked = f"{group.domain}/{group.effort.name}"
                raise UserError(f"distill.teachers: none is for {asked}, and tasks has such prompts; there are {known}")
            of_model.setdefault(key, []).extend(group.sampled)
            prompt = self.dialogue.prompt(self.dialogue.task(group.number), group.effort)
            for one in group.sampled:
                one.teacher_prompt = prompt
        for key in sorted(of_model, key=lambda key: (key[0], key[1].name)):
            self._score(self.models[key], of_model[key])
        for group in told:
            set_baselines(group.sampled, self.cfg.distill.limit)

    @torch.no_grad()
    def _score(self, model: k3.Model, sampled: Sequence[Sampled]) -> None:
        asked = [Sampled(one.teacher_prompt or one.prompt, one.tokens, one.behaviour) for one in sampled]
        length, of = self.cfg.data.seq_length, self.world.data_size
        micro = micro_batch(self.cfg.data, of)
        rows = pack([len(one) for one in asked], length)
        rows += [[]] * (-len(rows) % (micro * of))  # all ranks of an expert group score as often
        found: dict[int, list[float]] = {}
        for first in range(self.world.data_rank * micro, len(rows), micro * of):
            mine = rows[first : first + micro]
            batch = to_device(collate([[asked[i] for i in row] for row in mine], length, self.dialogue.fill), self.world.device)
            with model.fixed_weights():
                losses = model(batch.tokens, batch.document_starts, labels=batch.labels, score=True)[0].double().cpu()
            for b, row in enumerate(mine):
                at = 0
                for i in row:
                    drawn = slice(at + len(asked[i].prompt) - 1, at + len(asked[i]))
                    found[i], at = (-losses[b, drawn]).tolist(), at + len(asked[i])
        for of_rank in gather(self.world, found):
            for i, values in of_rank.items():
                sampled[i].teacher = values
