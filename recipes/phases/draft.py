"""`k3 draft`: the MTP layer learns to propose what the model says, which is frozen to the bit (report 4.3; k3/draft.py).

The text is that of pretraining: what counts is the model's own distribution on it, not the text's next tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import data
from data.batch import Batch
from k3 import Engine, Sampling, Trajectory
from k3.construct import unwrap
from parallel.context import stretch
from parallel.schedule import ParallelModel, evaluate, from_last_stage
from parallel.together import gather
from parallel.world import World
from recipes.assemble import Parts
from recipes.config import Config
from recipes.console import say
from recipes.objective import Objective, to_device
from recipes.phases import pretrain
from recipes.precision import low_precision
from recipes.run_folder import RunFolder
from recipes.trainer import Callback, StepResult, Trainer

RECORD = "draft.jsonl"  # in the run folder
PROMPTS, PROMPT, NEW = 32, 32, 48  # what is decoded with the draft at every measurement: prompts, their tokens, new ones


class Phase(pretrain.Phase):
    """Reads documents as pretraining does; trains what `recipes.phases.TRAINS` says."""

    def __init__(self, cfg: Config, world: World):
        super().__init__(cfg, world)
        self.heldout = data.heldout(cfg.data, self.prepared, 1 + cfg.draft.steps)

    def trainer(self, parts: Parts, position: int) -> Trainer:
        objective = DraftObjective.of(self.cfg.draft.steps, self.world)
        of = {"rank": self.world.data_rank, "of": self.world.data_size, "horizon": objective.horizon}
        stream = data.stream(self.cfg.data, self.prepared, position=position, **of)
        return Trainer(parts.model, parts.optimizer, stream, objective)

    def measures(self, folder: RunFolder) -> list[Callback]:
        decodes = low_precision(self.cfg.precision.name) is None  # generation does not honour it
        return [Acceptance(self.heldout, folder.path, self.cfg.run.eval_every, self.cfg.draft.steps, decodes)]


@dataclass(frozen=True)
class DraftObjective(Objective):
    """`weights` [S]: of the steps' acceptance losses, each a mean over its counted positions."""

    @classmethod
    def of(cls, steps: int, world: World) -> DraftObjective:
        return cls((1 / steps,) * steps, world)

    @property
    def steps(self) -> int:
        return len(self.weights)

    @property
    def horizon(self) -> int:
        return 1 + self.steps

    @property
    def names(self) -> tuple[str, ...]:
        """The loss, and by step how often a proposal is accepted: when sampling at temperature 1, and when decoding greedily."""
        each = range(1, self.steps + 1)
        return ("loss", *(f"draft/acceptance/{i}" for i in each), *(f"draft/greedy/{i}" for i in each))

    def denominators(self, micro_batches: Any) -> Tensor:
        """[S]: the steps' counted positions in the global batch, at least 1 each."""
        return super().denominators(micro_batches)[1:]

    def forward(self, stage: nn.Module, batch: Batch, step_tokens: int) -> Tensor:
        """[2 S, B, T] as k3/draft.py gives them."""
        return _forward(stage, to_device(batch, self.world.device), batch.tokens.numel() * self.world.data_size / step_tokens)

    def share(self, losses: Tensor, denominators: Tensor, batch: Batch | None = None) -> tuple[Tensor, Tensor]:
        """The scalar to differentiate, and the values of `names` [1 + 2 S] (detached)."""
        assert batch is not None
        own, agreed = losses.split(self.steps)
        counted = stretch(batch.loss_mask[1:].flatten(0, 1).to(losses.device), self.world).view(own.shape)
        each = own.sum((1, 2)) / denominators.to(losses)
        loss = (each * torch.tensor(self.weights, dtype=losses.dtype, device=losses.device)).sum()
        with torch.no_grad():
            accepted = torch.where(counted, (-own).exp(), 0.0).sum((1, 2)) / denominators.to(losses)
            greedy = agreed.sum((1, 2)) / denominators.to(losses)
        return loss, torch.cat([loss.detach()[None], accepted, greedy])

    def total(self, shares: Any) -> list[float]:
        total = torch.zeros(len(self.names), dtype=torch.float64, device=self.world.device)
        if shares:
            total += torch.stack(list(shares)).to(torch.float64).sum(0)
        return from_last_stage(self._sum(total, self.world.groups.dp_cp), self.world).tolist()


def _forward(stage: nn.Module, batch: Batch, share: float) -> Tensor:
    return stage(
        batch.tokens, batch.document_starts, labels=batch.labels, loss_mask=batch.loss_mask, padding=batch.padding, share=share,
        draft=True,
    )  # fmt: skip


@dataclass(frozen=True)
class Accepted:
    """How often a draft's proposals are accepted on held-out text, by step, and what that gives."""

    loss: float  # mean of the steps'
    sampling: tuple[float, ...]  # at temperature 1
    greedy: tuple[float, ...]
    tokens_sampling: float  # of one pass of the model over all proposals, where everything before is as in the text
    tokens_greedy: float


def accepted(model: ParallelModel, batches: list[Batch]) -> Accepted:
    """Every rank must call it with the same batches, which data ranks share. Leaves the model's mode as it was."""
    world, module = model.world, model.module
    steps = len(batches[0].loss_mask) - 1
    numbers = range(world.data_rank, len(batches), world.data_size)
    # the others wait in expert dispatch: a rank with one batch less takes part with any, which does not count
    filled = [*numbers, *[0] * (-(-len(batches) // world.data_size) - len(numbers))]
    training = module.training
    module.eval()
    try:
        sums = evaluate(
            model, [batches[i] for i in filled],
            lambda stage, batch: _forward(stage, to_device(batch, world.device), 1.0),
            lambda batch, found: _sums(to_device(batch, found.device), found, steps),
        )  # fmt: skip
    finally:
        module.train(training)
    total = torch.zeros(4 * steps + 3, dtype=torch.float64, device=world.device)
    for one in sums[: len(numbers)]:
        total += one
    if world.data_size > 1:
        dist.all_reduce(total, group=world.groups.dp)
    count, losses, sampling, greedy, whole, runs = total.split([steps] * 4 + [1, 2])
    mean = lambda x: tuple((x / count.clamp(min=1)).tolist())
    tokens = (1 + runs / whole.clamp(min=1)).tolist()
    return Accepted(sum(mean(losses)) / steps, mean(sampling), mean(greedy), *tokens)


def _sums(batch: Batch, found: Tensor, steps: int) -> Tensor:
    """[4 S + 3] float64: by step the counted positions, losses, chances of acceptance and agreements; then the positions that all
    steps count, and over these the expected number of accepted tokens, sampling and greedily.
    """
    mask = batch.loss_mask[1:]
    losses, agreed = found.double().split(steps)
    chance = torch.where(mask, (-losses).exp(), 0.0)
    whole = mask.all(0)
    run = [torch.where(whole, x.cumprod(0).sum(0), 0.0).sum() for x in (chance, agreed)]
    each = [x.sum((1, 2)) for x in (mask.double(), losses, chance, agreed)]
    return torch.cat([*each, torch.stack([whole.double().sum(), *run])])


class Acceptance(Callback):
    """Measures before the first step, every `every` steps (0: only at the end) and after the last, into draft.jsonl too.

    decodes: the engine also decodes held-out text greedily with the draft, and counts tokens a pass.
    """

    def __init__(self, batches: list[Batch], folder: Path, every: int, steps: int, decodes: bool):
        self.batches, self.folder, self.every, self.steps, self.decodes = batches, folder, every, steps, decodes
        self.engine: Engine | None = None

    def start(self, trainer: Trainer) -> None:
        if self.decodes:
            self.engine = Engine(unwrap(trainer.module), draft=self.steps)
        if trainer.progress.step == 0:
            self._measure(trainer, 0)

    def step(self, trainer: Trainer, result: StepResult) -> None:
        if result.step == trainer.steps or (self.every > 0 and result.step % self.every == 0):
            result.metrics |= self._measure(trainer, result.step)

    def complete(self, trainer: Trainer) -> None:
        records = [json.loads(line) for line in (self.folder / RECORD).read_text().splitlines()]
        found = {record["step"]: record for record in records}  # a resumed run may have written a step twice
        lines = [f"draft, step {step}: {in_words(found[step])}" for step in sorted({min(found), max(found)})]
        trainer.results.setdefault("report", []).extend(lines)

    def _measure(self, trainer: Trainer, step: int) -> dict[str, Any]:
        found = vars(accepted(trainer.model, self.batches))
        if self.engine is not None:
            found |= decoded(self.engine, self.batches, trainer.objective.world)
        if trainer.objective.world.rank == 0:
            with (self.folder / RECORD).open("a") as file:
                file.write(json.dumps({"step": step, **found}) + "\n")
        say(f"step {step}: draft on held-out text {in_words(found)}")
        return {f"draft/heldout/{name}": value for name, value in found.items() if isinstance(value, float)}


def decoded(engine: Engine, batches: list[Batch], world: World) -> dict[str, float]:
    """Real decoding, with the engine's draft, of continuations of held-out text. Data ranks share the prompts."""
    rows = [row for batch in batches for row in batch.tokens[:, :PROMPT].tolist()][:PROMPTS]
    mine = [Trajectory(row, (i,)) for i, row in enumerate(rows)][world.data_rank :: world.data_size]
    before = vars(engine.stats).copy()
    engine.run(mine, Sampling(temperature=0.0, max_new_tokens=NEW))
    now = [vars(engine.stats)[name] - before[name] for name in ("accepted", "proposed", "verified")]
    taken, proposed, verified = (sum(column) for column in zip(*gather(world, now)))
    return {"decoded_acceptance": taken / max(1, proposed), "decoded_tokens": 1 + taken / max(1, verified)}


def in_words(found: Mapping[str, Any]) -> str:
    rates = lambda name: " ".join(f"{100 * x:.0f}" for x in found[name])
    text = (
        f"after the text's own tokens the 1st, 2nd ... proposal is accepted {rates('sampling')} % sampling, {rates('greedy')} % "
        f"greedily, {found['tokens_sampling']:.2f} and {found['tokens_greedy']:.2f} tokens a pass"
    )
    real = "; after the model's own, decoding greedily, {:.2f} tokens a pass"
    return text + (real.format(found["decoded_tokens"]) if "decoded_tokens" in found else "")
