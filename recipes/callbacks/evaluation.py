"""The loss on the fixed held-out set, at intervals and after the last step, beside what n-gram counts reach on it."""

from __future__ import annotations

from collections.abc import Sequence

from data.batch import Batch
from data.ngram import Baselines
from recipes.console import say
from recipes.objective import heldout_loss
from recipes.trainer import Callback, StepResult, Trainer


class Evaluation(Callback):
    """Adds `heldout_loss` (nats per token) to the metrics every `every` steps (0: only at the end), at `also` and at the last."""

    def __init__(self, batches: Sequence[Batch], baselines: Baselines, every: int, also: int | None = None):
        self.batches = batches
        self.baselines = baselines
        self.every = every
        self.also = also
        self.evaluated = False

    def start(self, trainer: Trainer) -> None:
        tokens = sum(int(batch.loss_mask[0].sum()) for batch in self.batches)
        b = self.baselines
        say(f"held-out set: {tokens:,} tokens; bigram {b.bigram:.4f}, unigram {b.unigram:.4f} nats per token on it")

    def step(self, trainer: Trainer, result: StepResult) -> None:
        due = self.every > 0 and result.step % self.every == 0
        if not due and result.step not in (self.also, trainer.steps):
            return
        self.evaluated = True
        loss = heldout_loss(trainer.model, self.batches)
        result.metrics |= {"heldout_loss": loss, "bigram_loss": self.baselines.bigram, "unigram_loss": self.baselines.unigram}
        say(
            f"step {result.step}: held-out loss {loss:.4f} nats "
            f"(bigram {self.baselines.bigram:.4f}, unigram {self.baselines.unigram:.4f})"
        )

    def complete(self, trainer: Trainer) -> None:
        # a run that was killed after its last save trains no step: the pictures show what the model has read last
        if not self.evaluated:
            heldout_loss(trainer.model, self.batches)
