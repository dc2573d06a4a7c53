"""What each rank of `test_clip.py` does: one training step at learning rate 0 with heads whose logits are above tau.

A clipped layer changes what later layers read. So each layer is asked again, after the step, for the logits of the very inputs
that it saw in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import k3
import parallel
from k3.construct import unwrap
from k3.mla import MLA
from optim import weight_clip
from recipes.assemble import assemble
from recipes.config import Config
from recipes.proof.batches import Batches
from recipes.proof.randomise import randomise
from recipes.trainer import Callback, Trainer

TAU = 5.0
STEPS = 2  # of a cosine that falls to 0: the second step, which is taken, has learning rate 0
# by head: what its query weights are multiplied by. Far above tau, a little above it, below it, and without any logit but 0
QUERIES = (3000.0, 700.0, 1.0, 0.0)


@torch.no_grad()
def sharpen(model: k3.Model) -> None:
    """Random values everywhere, and QUERIES on this rank's heads of every MLA layer."""
    randomise(model, 0)
    tp = model.world.groups.tp
    for module in model.modules():
        if isinstance(module, MLA):
            factors = torch.tensor(QUERIES).chunk(tp.size())[tp.rank()]
            module.q_b_proj.weight.view(module.heads, -1).mul_(factors.unsqueeze(1).to(module.q_b_proj.weight))


class Inputs(Callback):
    """Notes what each MLA layer reads in the forward passes, and the largest logits it saw, before the optimizer resets them."""

    def __init__(self, model: nn.Module):
        self.layers = {n: m for n, m in unwrap(model).named_modules() if isinstance(m, MLA)}
        self.read: dict[str, list[Any]] = {n: [] for n in self.layers}
        self.logits: dict[str, Tensor] = {}
        for name, layer in self.layers.items():
            layer.register_forward_pre_hook(lambda _, args, name=name: self.read[name].append(args))

    def gradients(self, trainer: Trainer) -> None:
        self.logits = {n: m.max_logits.clone() for n, m in self.layers.items()}

    def again(self) -> dict[str, Tensor]:
        """The largest logits [heads] of the same inputs, by layer, with the weights of now."""
        out = {}
        for name, layer in self.layers.items():
            layer.max_logits.fill_(-torch.inf)
            for args in list(self.read[name]):
                layer(*args)
            out[name] = layer.max_logits.clone()
        return out


def step(cfg: Config, broken: str = "") -> dict[str, Any]:
    """This rank's weights before and after, the logits of its heads before and after, and what the step reported."""
    if broken:
        BREAK[broken]()
    world = parallel.start(cfg.parallel, "cpu")
    dtype = getattr(torch, cfg.prove.dtype.value)
    parts = assemble(cfg.model, cfg.optim, world, dtype=dtype, seed=0, steps=STEPS, prepare=sharpen)
    model = unwrap(parts.model.module)
    inputs = Inputs(model)
    stream = Batches(cfg.prove, cfg.model.vocab_size, parts.objective.horizon, rank=world.data_rank, of=world.data_size)
    trainer = Trainer(parts.model, parts.optimizer, stream, parts.objective, callbacks=[inputs])
    model.train()
    parts.optimizer.counters()["step"].fill_(STEPS - 1)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    report = trainer.train_step().report
    after = {n: p.detach().clone() for n, p in model.named_parameters()}

    def over_data(logits: dict[str, Tensor]) -> dict[str, Tensor]:
        for values in logits.values():
            if world.groups.dp_cp.size() > 1:
                dist.all_reduce(values, op=dist.ReduceOp.MAX, group=world.groups.dp_cp)
        return logits

    shards = parts.model.shards
    return {
        "lr": report.lr,
        "clipped": report.clipped_heads,
        "max_logit": report.max_logit,
        "before": before,
        "after": after,
        "first": over_data(inputs.logits),
        "second": over_data(inputs.again()),
        "agree": all(
            torch.equal(shards[n].of(after[n]).flatten(), master.to(dtype).flatten())
            for n, master in parts.optimizer.masters.items()
        ),
        "masters": len(parts.optimizer.masters),
        "tensor": world.groups.tp.rank(),
        "heads": {n: (m.nope, m.rope, m.value) for n, m in inputs.layers.items()},
        "kda": sum(n.endswith("A_log") for n in before),
    }


def _own_tokens_alone() -> None:
    from parallel.shards import Shards

    Shards.max_over_data = lambda self, values: values  # type: ignore[method-assign]


def _shared_key_forgotten() -> None:
    real = weight_clip._scale_rows

    def by_root(part: Tensor, factors: Tensor, shard: Any) -> None:
        real(part, torch.where(factors < 1, factors.max(), factors), shard)

    weight_clip._scale_rows = by_root


def _working_copy_alone() -> None:
    from optim.optimizer import Optimizer

    Optimizer._publish = lambda self, names: self.shards.sync()  # type: ignore[method-assign]


BREAK: dict[str, Callable[[], None]] = {
    "own tokens alone": _own_tokens_alone,
    "factors forgotten": _shared_key_forgotten,
    "masters alone": _working_copy_alone,
}
