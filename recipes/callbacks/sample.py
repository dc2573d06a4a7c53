"""A few lines that the trained model writes, so that a reader sees what the loss means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import k3
from data.tokenizer import Tokenizer
from k3.construct import unwrap
from parallel.schedule import ParallelModel, evaluate, from_last_stage
from recipes.console import say
from recipes.trainer import Callback, Trainer

TEMPERATURE = 0.8
TOP_K = 50


class Sample(Callback):
    """Continues `prompt` by `tokens` tokens into sample.txt. The draw is fixed by `seed`.

    All ranks compute and draw the same; the first writes.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, prompt: str, tokens: int, seed: int):
        self.folder, self.tokenizer, self.prompt, self.tokens, self.seed = folder, tokenizer, prompt, tokens, seed

    def complete(self, trainer: Trainer) -> None:
        if not self.tokens:
            return
        world = trainer.objective.world
        prompt = torch.tensor([self.tokenizer.encode(self.prompt)], dtype=torch.int64, device=world.device)
        whole = unwrap(trainer.module)
        trainer.module.eval()
        engine = whole.is_whole and k3.Engine.takes(whole)
        model = whole if engine else _logits(trainer.model)
        with whole.fixed_weights():
            tokens = k3.generate(model, prompt, self.tokens, temperature=TEMPERATURE, top_k=TOP_K, seed=self.seed)
        text = self.tokenizer.decode(tokens[0].tolist())
        trainer.results["sample"] = text
        if world.rank == 0:
            (self.folder / "sample.txt").write_text(text + "\n")
        say("sample:\n" + "\n".join("    " + line for line in text.splitlines()))


def _logits(model: ParallelModel) -> Callable[[Tensor], Tensor]:
    """tokens [B, T] -> logits of the last position [B, 1, V], on every rank, from the last stage of a pipeline."""

    def call(tokens: Tensor) -> Tensor:
        out = evaluate(model, [tokens], lambda stage, batch: stage(batch), lambda _, logits: logits[:, -1:].contiguous())
        shape = (len(tokens), 1, unwrap(model.module).k3.vocab_size)
        logits = out[0] if out else torch.empty(shape, dtype=model.config.params_dtype, device=tokens.device)
        return from_last_stage(logits, model.world)

    return call
