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

    def __init__(self, batches: Sequence[Batch], baselines: Baselines | None, every: int, also: int | None = None):
        """baselines: what n-gram counts reach; None where they say nothing."""
        self.batches = batches
        self.baselines = baselines
        self.every = every
        self.also = also
        self.evaluated = False

    def start(self, trainer: Trainer) -> None:
        tokens = sum(int(batch.loss_mask[0].sum()) for batch in self.batches)
        b = self.baselines
        than = f"; bigram {b.bigram:.4f}, unigram {b.unigram:.4f} nats per token on it" if b else ""
        say(f"held-out set: {tokens:,} tokens{than}")

    def step(self, trainer: Trainer, result: StepResult) -> None:
        due = self.every > 0 and result.step % self.every == 0
        if not due and result.step not in (self.also, trainer.steps):
            return
        self.evaluated = True
        loss = heldout_loss(trainer.model, self.batches)
        result.metrics["heldout_loss"] = loss
        than = ""
        if b := self.baselines:
            result.metrics |= {"bigram_loss": b.bigram, "unigram_loss": b.unigram}
            than = f" (bigram {b.bigram:.4f}, unigram {b.unigram:.4f})"
        say(f"step {result.step}: held-out loss {loss:.4f} nats{than}")

    def complete(self, trainer: Trainer) -> None:
        # a run that was killed after its last save trains no step: the pictures show what the model has read last
        if not self.evaluated:
            heldout_loss(trainer.model, self.batches)
