"""The stream of RL: groups and their advantages, what waits and goes on, budgets, efforts, and what is told of all that."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest
import torch

import k3
import parallel
from data.config import DataConfig
from data.tasks import Task
from k3 import Engine, Sampling, Trajectory
from parallel.config import ParallelConfig
from recipes.errors import UserError
from recipes.rewards.judge import Verdict
from recipes.rl.batch import Sampled
from recipes.rl.config import BudgetConfig, Effort, Even, RlConfig
from recipes.rl.rollouts import Rollouts, Told
from tests.k3.randomise import randomise

SEED, STOP = 5, tuple(range(0, 256, 8))
CONFIG = RlConfig(prompts=3, samples=4, max_new_tokens=9, slots=16, even=Even.keep)


class Numbers:
    """Prompts that say their number; what is sampled is worth its parity, and an even number of them a problem."""

    fill, stop = 1, STOP

    def task(self, number: int) -> Task:
        return Task(f"t{number}", str(number), "", ("odd", "even")[number % 2 == 0], {})

    def effort(self, number: int, task: Task) -> Effort:
        return Effort.none

    def prompt(self, task: Task, effort: Effort) -> list[int]:
        return [7, 200, 3 + int(task.prompt) % 50]

    def judge(self, answers: Sequence[tuple[Task, Sequence[int]]]) -> list[Verdict]:
        return [Verdict(float(sum(tokens) % 2), ("garbage",) if len(tokens) % 2 == 0 else ()) for _, tokens in answers]


@pytest.fixture(scope="module")
def model() -> k3.Model:
    small = dataclasses.replace(k3.preset("tiny"), layers=4)
    return randomise(k3.build(small, parallel.start(ParallelConfig(dp=1), "cpu")))


def rollouts(model: k3.Model, cfg: RlConfig = CONFIG, *, steps: int = 10, length: int = 32, **more) -> Rollouts:
    rows = DataConfig(seq_length=length, micro_batch_size=2)
    return Rollouts(cfg, rows, model.world, Numbers(), Engine(model, slots=cfg.slots), seed=SEED, steps=steps, **more)


def watched(stream: Rollouts) -> list[list[Sampled]]:
    """What each step's batch is made of, as steps are taken."""
    seen: list[list[Sampled]] = []
    batch = stream._batch

    def keep(sampled, index):
        seen.append(list(sampled))
        return batch(sampled, index)

    stream._batch = keep  # type: ignore[method-assign]
    return seen


def uninterrupted(model: k3.Model, number: int, k: int) -> Trajectory:
    prompts = Numbers()
    one = Trajectory(prompts.prompt(prompts.task(number), Effort.none), (number, k))
    sampling = Sampling(max_new_tokens=CONFIG.max_new_tokens, stop=STOP)
    Engine(model, slots=16, prefix_bytes=0).run([one], sampling, seed=SEED)
    return one


def test_an_advantage_is_the_reward_less_the_groups_mean(model: k3.Model) -> None:
    stream = rollouts(model)
    seen = watched(stream)
    batch = next(stream)
    assert stream.position == 1 and stream.begun == 3 and len(seen[0]) == 12
    for number in range(3):
        group = seen[0][4 * number : 4 * number + 4]
        assert all(one.prompt == group[0].prompt and one.stale == 0 for one in group)
        rewards = [float(sum(one.tokens) % 2) for one in group]
        assert [one.advantage for one in group] == [r - sum(rewards) / 4 for r in rewards]
    assert sum(int(micro.loss_mask.sum()) for micro in batch.micro_batches) == sum(len(one.tokens) for one in seen[0])
    assert all(micro.tokens.shape[0] <= 2 and micro.tokens.shape[1] == 32 for micro in batch.micro_batches)
    assert stream.metrics["rl/problems/garbage"] == sum(len(one.tokens) % 2 == 0 for one in seen[0])
    assert stream.metrics["rl/cut"] == sum(one.tokens[-1] not in STOP for one in seen[0]) / 12
    assert stream.metrics["rl/stale"] == 0 and stream.metrics["rl/waiting_groups"] == 0


@pytest.mark.parametrize("complete", [0.05, 0.3, 0.5, 0.9])
def test_what_waits_goes_on_to_the_very_tokens_of_an_uninterrupted_run(model: k3.Model, complete: float) -> None:
    """Weights do not change here. However small the share, every step ends with a group."""
    stream = rollouts(model, dataclasses.replace(CONFIG, complete=complete))
    seen = watched(stream)
    for _ in range(6):
        next(stream)
        assert stream.metrics["rl/groups"] > 0 and stream.begun - len(stream.waiting) == sum(map(len, seen)) // 4
    told = [one for step in seen for one in step]
    assert any(one.stale for one in told) or complete == 0.9
    numbers = sorted({one.prompt[-1] - 3 for one in told})
    assert len(told) == 4 * len(numbers), "each group once, and whole"
    for number in numbers:
        group = [one for one in told if one.prompt[-1] - 3 == number]
        for k, one in enumerate(group):
            alone = uninterrupted(model, number, k)
            assert list(one.tokens) == alone.tokens and list(one.behaviour) == alone.logprobs


def test_groups_whose_trajectories_wait_for_each_other_do_not_stall(model: k3.Model) -> None:
    """One of each group finished is the share of all of them that was asked for, and no group is whole."""
    stream = rollouts(model, dataclasses.replace(CONFIG, samples=2, complete=0.5))
    stream._begin()
    for group in stream.waiting:
        group.trajectories[0].tokens, group.trajectories[0].logprobs = [8], [-1.0]
        group.trajectories[0].finished = "stop"
    next(stream)
    assert stream.metrics["rl/groups"] >= 1


def test_longer_than_the_budget_is_minus_one_and_the_budget_anneals(model: k3.Model) -> None:
    cfg = dataclasses.replace(CONFIG, budget=BudgetConfig(start=2.0, end=0.5))
    stream = rollouts(model, cfg, steps=4)
    seen = watched(stream)
    for step in range(4):
        next(stream)
        assert set(stream.lengths) == {"odd", "even"} and all(1 <= v <= 9 for v in stream.lengths.values())
        factor = 2.0 + (0.5 - 2.0) * step / 3
        for domain, b0 in stream.lengths.items():
            assert stream.metrics[f"rl/budget/{domain}"] == pytest.approx(factor * b0)
        rewards = []
        for one in seen[step]:
            most = factor * stream.lengths[("odd", "even")[(one.prompt[-1] - 3) % 2 == 0]]
            rewards.append(-1.0 if len(one.tokens) > most else float(sum(one.tokens) % 2))
        for first in range(0, len(rewards), 4):
            mean = math.fsum(rewards[first : first + 4]) / 4
            assert [one.advantage for one in seen[step][first : first + 4]] == [r - mean for r in rewards[first : first + 4]]
        assert stream.metrics["rl/reward"] == pytest.approx(sum(rewards) / len(rewards))
    assert -1.0 in rewards, "the last budget is a tight one"


def test_a_prompt_that_fits_no_row_is_refused(model: k3.Model) -> None:
    with pytest.raises(
        UserError, match=r"data.seq_length=10: task t0 has a prompt of 3 tokens, which with rl.max_new_tokens=9 takes 11"
    ):
        next(rollouts(model, length=10))


def test_groups_without_a_difference_are_left_out(model: k3.Model) -> None:
    kept, dropped = rollouts(model), rollouts(model, dataclasses.replace(CONFIG, even=Even.drop))
    every, learnt = watched(kept), watched(dropped)
    for _ in range(5):
        next(kept), next(dropped)
    for all_of_them, some in zip(every, learnt):
        groups = [all_of_them[first : first + 4] for first in range(0, len(all_of_them), 4)]
        mixed = [one for group in groups if any(one.advantage for one in group) for one in group]
        assert [one.tokens for one in some] == [one.tokens for one in mixed or groups[0]]
    even = [Told(number, "odd", Effort.none, [], [1.0, 1.0], [1.0, 1.0], [], 0) for number in range(3)]
    assert dropped._learnt(even) == even[:1] and kept._learnt(even) == even


@pytest.mark.parametrize("even", Even)
def test_a_step_whose_groups_are_all_even_is_idle(model: k3.Model, even: Even) -> None:
    """Of rewards, too, whose mean is another number by rounding: three times 0.1."""
    stream = rollouts(model, dataclasses.replace(CONFIG, even=even, samples=3))
    judge = stream.prompts.judge
    assert next(stream).idle is None
    stream.prompts.judge = lambda answers: [Verdict(0.1) for _ in answers]  # type: ignore[method-assign]
    batch = next(stream)
    assert batch.idle == "in none of 3 groups did rewards differ"
    assert all(not micro.advantage.any() for micro in batch.micro_batches) and stream.metrics["rl/mixed_groups"] == 0
    stream.prompts.judge = judge  # type: ignore[method-assign]
    assert next(stream).idle is None
    taught = rollouts(model, teach=lambda told: None)
    taught.prompts.judge = lambda answers: [Verdict(0.1) for _ in answers]  # type: ignore[method-assign]
    assert next(taught).idle is None, "teachers judge tokens, whatever these are worth"


def test_what_waits_is_kept_as_it_was_when_it_was_asked_for(model: k3.Model) -> None:
    """It is written to a checkpoint while the next step already goes on."""
    stream = rollouts(model, dataclasses.replace(CONFIG, complete=0.05))
    next(stream)
    facts = stream.facts()
    before = repr(facts)
    assert facts["waiting"]
    states = {box.name: box.tensor.clone() for box in stream.boxes()}
    kept = {box.name: box.tensor for box in stream.boxes()}
    next(stream)
    assert repr(facts) == before
    assert states and all(torch.equal(states[name], kept[name]) for name in states)


def test_a_teacher_takes_the_place_of_advantages(model: k3.Model) -> None:
    def teach(told) -> None:
        for group in told:
            for one in group.sampled:
                one.teacher = [-1.5] * len(one.tokens)

    batch = next(rollouts(model, teach=teach))
    for micro in batch.micro_batches:
        assert micro.advantage is None and (micro.teacher[micro.loss_mask[0]] == -1.5).all()
