"""The stream of RL: prompts in, sampled and judged groups of trajectories out, packed for one update (report 4.2).

A step samples until a share `rl.complete` of the unfinished trajectories is finished. A group is used once all its trajectories
are; what is not finished waits with its states and goes on first in the next step (partial rollouts), so that one long answer
does not hold up the others. Every token keeps the log-probability under the weights that drew it.

Data ranks sample groups of their own; what is finished is told to all, so that the update does not depend on who sampled what.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from data.batch import StepBatch
from data.config import DataConfig, micro_batch
from data.tasks import Task
from k3 import Engine, Sampling, Trajectory
from k3.generation.states import State
from parallel.boxes import Box, StateProvider
from parallel.checkpoint_folder import changes, layout
from parallel.together import gather
from parallel.world import World
from recipes.errors import UserError
from recipes.rewards.judge import Verdict
from recipes.rl.batch import Sampled, collate, once, pack
from recipes.rl.config import Effort, Even, RlConfig

PROBES = 64  # prompts whose answers tell how long those of the initial model are


class Prompts(Protocol):
    """Where prompts come from and what answers are worth; see recipes/dialogue.py."""

    @property
    def fill(self) -> int:
        """A token for padding."""

    @property
    def stop(self) -> tuple[int, ...]:
        """Tokens that end an answer."""

    def task(self, number: int) -> Task: ...
    def effort(self, number: int, task: Task) -> Effort: ...
    def prompt(self, task: Task, effort: Effort) -> list[int]: ...
    def judge(self, answers: Sequence[tuple[Task, Sequence[int]]]) -> list[Verdict]: ...


@dataclass
class Group:
    """The trajectories of one prompt."""

    number: int
    task: Task
    effort: Effort
    trajectories: list[Trajectory]

    @classmethod
    def new(cls, number: int, prompts: Prompts, trajectories: Sequence[Mapping[str, Any]]) -> Group:
        """The group of prompt `number`; trajectories: what each has already."""
        task = prompts.task(number)
        effort = prompts.effort(number, task)
        prompt = prompts.prompt(task, effort)
        return cls(number, task, effort, [Trajectory(prompt, (number, k), **one) for k, one in enumerate(trajectories)])

    @property
    def finished(self) -> bool:
        return all(one.finished for one in self.trajectories)

    def plain(self) -> dict[str, Any]:
        """As JSON, which keeps every bit of a float; without the states. Copies: it is written while these go on."""
        of = [{"tokens": list(one.tokens), "logprobs": list(one.logprobs), "finished": one.finished} for one in self.trajectories]
        return {"number": self.number, "trajectories": of}


@dataclass
class Told:
    """A finished group as all ranks hear of it."""

    number: int
    domain: str
    effort: Effort
    sampled: list[Sampled]
    rewards: list[float]
    scores: list[float]  # without what the budget took
    problems: list[str]
    cut: int  # trajectories that reached rl.max_new_tokens


type Teach = Callable[[Sequence[Told]], None]


class Rollouts:
    """Yields a step's batch. `position`: steps taken; `metrics`: of the last one. Keeps what waits, for checkpoints: under the
    layout that wrote one it goes on with the very states, under another it computes them again from the tokens.
    """

    per_rank = True

    def __init__(
        self,
        cfg: RlConfig,
        rows: DataConfig,
        world: World,
        prompts: Prompts,
        engine: Engine,
        *,
        seed: int,
        steps: int,
        position: int = 0,
        teach: Teach | None = None,
    ):
        """teach: sets `Sampled.teacher` of the trajectories, instead of advantages."""
        self.cfg, self.rows, self.world, self.prompts, self.engine = cfg, rows, world, prompts, engine
        self.seed, self.steps, self.position, self.teach = seed, steps, position, teach
        self.sampling = Sampling(max_new_tokens=cfg.max_new_tokens, stop=prompts.stop)
        self.begun = 0  # prompts, on all ranks
        self.waiting: list[Group] = []  # of this data rank
        self.lengths: dict[str, float] = {}  # b0 by domain
        self.metrics: dict[str, Any] = {}
        self._loading: dict[str, Tensor] | None = None  # by the names of boxes
        self._micro = micro_batch(rows, world.data_size)

    def __next__(self) -> StepBatch:
        began = time.perf_counter()
        self.engine.clear()  # what it remembers of prompts is of the last step's weights
        if self.cfg.budget.start is not None and not self.lengths:
            self.lengths = self._initial_lengths()
        old = {one.key: len(one.tokens) for group in self.waiting for one in group.trajectories}
        told: list[Told] = []
        while not told:
            self._begin()
            self._sample()
            finished = [group for group in self.waiting if group.finished]
            self.waiting = [group for group in self.waiting if not group.finished]
            told = self._tell(finished, old)
        if self.teach is not None:
            self.teach(told)
        self._report(told, time.perf_counter() - began)
        index, self.position = self.position, self.position + 1
        batch = self._batch([one for group in self._learnt(told) for one in group.sampled], index)
        return replace(batch, idle=self._idle(told))

    def _learnt(self, told: Sequence[Told]) -> Sequence[Told]:
        """The groups that the update is computed from: whose advantages are all zero, a fresh one adds nothing to it.

        Where all are, one stays: an update needs rows.
        """
        if self.teach is not None or self.cfg.even is Even.keep:
            return told
        return [group for group in told if len(set(group.rewards)) > 1] or told[:1]

    def _idle(self, told: Sequence[Told]) -> str | None:
        """Why an update would be one from rounding errors, which Muon makes as large as any."""
        if self.teach is not None or any(len(set(group.rewards)) > 1 for group in told):
            return None
        return f"in none of {len(told)} groups did rewards differ"

    def check(self) -> None:
        """Raises UserError where prompts of the first step do not fit a row: before anything is written. Alike on all ranks."""
        for number in range(self.cfg.prompts):
            if wrong := self._too_long(Group.new(number, self.prompts, [{}])):
                raise UserError(wrong)

    def facts(self) -> dict[str, Any]:
        """What waits, on all ranks, and what each rank's tensors look like."""
        own = [group.plain() for group in self.waiting] if self._speaks else []
        waiting = sorted((group for of_rank in gather(self.world, own) for group in of_rank), key=lambda group: group["number"])
        shapes = {box.name: [list(box.shape), str(box.tensor.dtype).removeprefix("torch.")] for box in self.boxes()}
        states = {"layout": layout(self.world), "ranks": gather(self.world, shapes)}
        return {"begun": self.begun, "lengths": dict(self.lengths), "waiting": waiting, "states": states}

    def take(self, facts: dict[str, Any]) -> None:
        self.begun, self.lengths = facts["begun"], facts["lengths"]
        mine = [g for g in facts["waiting"] if g["number"] % self.world.data_size == self.world.data_rank]
        self.waiting = [Group.new(plain["number"], self.prompts, plain["trajectories"]) for plain in mine]
        moved = changes(facts["states"]["layout"], layout(self.world))
        shapes = facts["states"]["ranks"][0 if moved else self.world.rank]  # as parallel.boxes.StateProvider has it
        self._loading = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in shapes.items()}

    @property
    def provider(self) -> StateProvider:
        return self

    def boxes(self) -> Iterator[Box]:
        """The states of what waits, or those that are being loaded."""
        if self._loading is not None:
            yield from (Box.whole(name, tensor) for name, tensor in self._loading.items())
            return
        for one in (one for group in self.waiting for one in group.trajectories):
            for name, tensor in (one.state.to_tensors() if one.state else {}).items():
                yield Box.whole(f"{'.'.join(map(str, one.key))}.{name}", tensor)

    def loaded(self, anew: int | None = None) -> None:
        found, self._loading = self._loading or {}, None
        if anew is not None:
            return  # they are another rank's
        for one in (one for group in self.waiting for one in group.trajectories):
            of = f"{'.'.join(map(str, one.key))}."
            if state := {name.removeprefix(of): tensor for name, tensor in found.items() if name.startswith(of)}:
                one.state = State.from_tensors(state)

    def _begin(self) -> None:
        """New prompts, until as many as `rl.prompts` are in flight."""
        flying = sum(gather(self.world, len(self.waiting) if self._speaks else 0))
        numbers = range(self.begun, self.begun + self.cfg.prompts - flying)
        mine = [n for n in numbers if n % self.world.data_size == self.world.data_rank]
        new = [Group.new(number, self.prompts, [{}] * self.cfg.samples) for number in mine]
        for wrong in gather(self.world, next((line for group in new if (line := self._too_long(group))), None)):
            if wrong:
                raise UserError(wrong)  # on all ranks: one alone would leave the others waiting
        self.waiting += new
        self.begun = numbers.stop

    def _too_long(self, group: Group) -> str | None:
        """What to tell of a group whose trajectories may not fit a row."""
        prompt, most = group.trajectories[0].prompt, self.cfg.max_new_tokens
        if (size := len(prompt) + most - 1) <= self.rows.seq_length:
            return None
        return (
            f"data.seq_length={self.rows.seq_length}: task {group.task.id} has a prompt of {len(prompt)} tokens, which with "
            f"rl.max_new_tokens={most} takes {size}; give longer rows or fewer new tokens"
        )

    def _sample(self) -> None:
        # of the unfinished alone: those that wait for others of their group must not make up the share, or nothing would go on
        flying = [one for group in self.waiting for one in group.trajectories if not one.finished]
        enough = math.ceil(self.cfg.complete * len(flying))
        self.engine.run(flying, self.sampling, enough=enough, seed=self.seed)

    @property
    def _speaks(self) -> bool:
        """Whether this is the one rank that tells of its data rank's groups."""
        groups = self.world.groups
        return groups.tp.rank() == 0 and groups.cp.rank() == 0

    def _tell(self, finished: Sequence[Group], old: dict[tuple[int, ...], int]) -> list[Told]:
        """The finished groups of all ranks, judged where they were sampled, by number."""
        told = [*self._judged(finished, old)] if self._speaks else []
        return sorted((group for of_rank in gather(self.world, told) for group in of_rank), key=lambda group: group.number)

    def _judged(self, finished: Sequence[Group], old: dict[tuple[int, ...], int]) -> Iterator[Told]:
        verdicts = iter(self.prompts.judge([(group.task, one.tokens) for group in finished for one in group.trajectories]))
        for group in finished:
            verdict = [next(verdicts) for _ in group.trajectories]
            scores = [v.score for v in verdict]
            most = self._budget(group.task.domain)
            rewards = [-1.0 if len(one.tokens) > most else s for one, s in zip(group.trajectories, scores)]
            mean = math.fsum(rewards) / len(rewards) if len(set(rewards)) > 1 else rewards[0]  # then nothing is left of it
            sampled = once(
                Sampled(one.prompt, one.tokens, one.logprobs, old.get(one.key, 0), reward - mean)
                for one, reward in zip(group.trajectories, rewards)
            )
            cut = sum(one.finished == "length" for one in group.trajectories)
            problems = [problem for v in verdict for problem in v.problems]
            yield Told(group.number, group.task.domain, group.effort, sampled, rewards, scores, problems, cut)

    def _budget(self, domain: str) -> float:
        """Tokens that a trajectory may have in this step."""
        b = self.cfg.budget
        if b.start is None:
            return math.inf
        factor = b.start + (b.end - b.start) * min(1.0, self.position / max(1, self.steps - 1))
        whole = math.fsum(self.lengths.values()) / max(1, len(self.lengths))
        return factor * self.lengths.get(domain, whole)

    def _initial_lengths(self) -> dict[str, float]:
        """b0: tokens of the answers that the weights of now give, on average, by domain."""
        tasks = [(number, self.prompts.task(number)) for number in range(PROBES)]
        mine = tasks[self.world.data_rank :: self.world.data_size]
        tried = [Trajectory(self.prompts.prompt(task, self.prompts.effort(n, task)), (n, -1)) for n, task in mine]
        self.engine.run(tried, self.sampling, seed=self.seed)
        own = [(task.domain, len(one.tokens)) for (_, task), one in zip(mine, tried)] if self._speaks else []
        found: dict[str, list[int]] = {}
        for of_rank in gather(self.world, own):
            for domain, length in of_rank:
                found.setdefault(domain, []).append(length)
        return {domain: sum(lengths) / len(lengths) for domain, lengths in sorted(found.items())}

    def _batch(self, sampled: Sequence[Sampled], index: int) -> StepBatch:
        """This data rank's rows, of which all ranks have as many."""
        length, of = self.rows.seq_length, self.world.data_size
        rows = [[sampled[i] for i in items] for items in pack([len(one) for one in sampled], length)]
        passes = -(-len(rows) // (self._micro * of))
        micro = -(-len(rows) // (passes * of))  # as even as they come
        rows += [[]] * (passes * micro * of - len(rows))
        mine = [rows[first + self.world.data_rank * micro :][:micro] for first in range(0, len(rows), micro * of)]
        return StepBatch([collate(part, length, self.prompts.fill) for part in mine], index, len(rows) * length)

    def _report(self, told: Sequence[Told], seconds: float) -> None:
        rewards = [reward for group in told for reward in group.rewards]
        drawn = [(len(one.tokens), one.stale, one.times) for group in told for one in group.sampled]
        count = sum(times for *_, times in drawn)
        tokens = sum(length * times for length, _, times in drawn)
        by_domain: dict[str, list[float]] = {}
        for group in told:
            by_domain.setdefault(group.domain, []).extend(group.scores)
        problems = Counter(problem for group in told for problem in group.problems)
        old = sum(stale * times for _, stale, times in drawn)
        waiting = sum(gather(self.world, len(self.waiting) if self._speaks else 0))
        self.metrics = {
            "rl/reward": sum(rewards) / len(rewards),
            "rl/mixed_groups": sum(len(set(group.rewards)) > 1 for group in told) / len(told),
            "rl/groups": len(told),
            "rl/waiting_groups": waiting,
            "rl/tokens": tokens / count,
            "rl/cut": sum(group.cut for group in told) / count,
            "rl/stale": old / max(1, tokens),
            "rl/different": len(drawn) / count,
            "rl/seconds": seconds,
            **{f"rl/score/{domain}": sum(s) / len(s) for domain, s in sorted(by_domain.items())},
            **{f"rl/problems/{kind}": count for kind, count in sorted(problems.items())},
        }
        if self.cfg.budget.start is not None:
            self.metrics |= {f"rl/budget/{domain}": self._budget(domain) for domain in self.lengths}
