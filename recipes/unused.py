"""Keys that were typed but that nothing would read: refused, so that no option is silently ignored (design principle 5)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from k3.activations import Save
from k3.config import Activation, Attention, Balance, Gate, Residual
from k3.qat import Qat
from optim.config import OptimizerName, ScheduleName
from parallel.config import world_size
from recipes import processes
from recipes.config import Config, WandbMode
from recipes.phases.rules import IDLE


def _processes(cfg: Config) -> int:
    return world_size(cfg.parallel, processes.count(os.environ))


def _undivided(cfg: Config) -> bool:
    """Whether the optimizer's state is cut over no replicas: neither of dense parameters nor of experts."""
    layout = cfg.parallel
    ranks = _processes(cfg) // layout.pp
    return layout.zero == 0 or (ranks == layout.tp and (ranks == layout.ep or not cfg.model.moe.experts))


SPIKES = ("window", "deviations", "grad_norm", "loss")  # of optim.guard: when a step is one
# a key or section -> (is it without effect?, why)
RULES: dict[str, tuple[Callable[[Config], bool], str]] = {
    "model.kda": (lambda c: c.model.attention is Attention.mla, "model.attention=mla has no KDA layers"),
    "model.kda.lower_bound": (lambda c: c.model.kda.gate is Gate.softplus, "model.kda.gate=softplus has no bound"),
    "model.residual_block": (lambda c: c.model.residual is Residual.sum, "model.residual=sum has no blocks"),
    "model.situ_beta": (lambda c: c.model.activation is Activation.swiglu, "model.activation=swiglu has no betas"),
    "model.situ_linear_beta": (lambda c: c.model.activation is Activation.swiglu, "model.activation=swiglu has no betas"),
    "model.init_std": (lambda c: c.run.init is not None, "run.init brings the parameters"),
    "model.mtp_weight": (lambda c: not c.model.mtp_layers, "model.mtp_layers=0 has no MTP loss"),
    "model.dense_size": (lambda c: bool(c.model.moe.experts) and not c.model.dense_layers, "there is no dense layer"),
    "model.moe.latent_size": (lambda c: not c.model.latent, "model.latent=false has no latents"),
    "model.moe.bins": (lambda c: c.model.moe.balance is not Balance.quantile, "only model.moe.balance=quantile counts in bins"),
    "model.moe.ema": (lambda c: c.model.moe.balance is not Balance.quantile, "only model.moe.balance=quantile averages"),
    "model.moe.bias_step": (lambda c: c.model.moe.balance is not Balance.bias, "only model.moe.balance=bias takes steps"),
    "model.moe.aux_weight": (lambda c: c.model.moe.balance is not Balance.aux, "only model.moe.balance=aux has a loss"),
    "model.moe": (lambda c: not c.model.moe.experts, "model.moe.experts=0 has no experts"),
    "optim.router": (lambda c: not c.model.moe.experts, "model.moe.experts=0 has no router"),
    "optim.muon": (lambda c: c.optim.name is OptimizerName.adamw, "optim=adamw uses no Muon"),
    "optim.muon.distribution": (_undivided, "ZeRO has no replicas to cut matrices over; give parallel.dp and parallel.zero=1"),
    "optim.muon.nesterov": (lambda c: c.optim.muon.momentum == 0, "optim.muon.momentum=0 has no momentum to look ahead with"),
    "optim.clip.tau": (lambda c: not c.optim.clip.enabled, "optim.clip.enabled=false clips nothing"),
    **{
        f"optim.guard.{key}": (lambda c: not c.optim.guard.enabled, "optim.guard.enabled=false looks for no spikes")
        for key in ("min_steps", *SPIKES)
    },
    "optim.schedule.decay": (lambda c: c.optim.schedule.name is not ScheduleName.wsd, "only optim.schedule.name=wsd decays late"),
    "optim.schedule.min_lr": (
        lambda c: c.optim.schedule.name is ScheduleName.constant or c.optim.schedule.warmup == 1,
        "the learning rate never decays",
    ),
    **{
        f"data.long.{key}": (lambda c: not c.data.long.recall, "data.long.recall=0 has no rows with facts")
        for key in ("facts", "questions")
    },
    "activations.head": (
        lambda c: c.activations.head_chunk is not None,
        "activations.head_chunk computes the head again as it is",
    ),
    **{
        f"data.ramp.{key}": (lambda c: c.data.ramp.start is None, "data.ramp.start=null has no ramp")
        for key in ("increment", "samples")
    },
    "parallel.bucket": (lambda c: not c.parallel.overlap, "parallel.overlap=false reduces all gradients at once"),
    **{f"parallel.{key}": (lambda c: _processes(c) == 1, "one process has no replicas") for key in ("zero", "overlap")},
    **{
        f"activations.{key}": (
            lambda c: c.activations.layer is Save.recompute,
            "activations.layer=recompute recomputes it with the layer",
        )
        for key in ("attention", "feed_forward")
    },
    "qat.rule": (lambda c: c.qat.name is Qat.none, "qat=none quantises nothing"),
    "checkpoint.keep_every": (lambda c: c.checkpoint.every == 0, "checkpoint.every=0 saves at the end alone"),
    "run.sample_prompt": (lambda c: not c.run.sample_tokens, "run.sample_tokens=0 makes no sample"),
    "wandb.project": (lambda c: c.wandb.mode is WandbMode.disabled, "wandb.mode=disabled logs nothing there"),
    **{
        f"wandb.{key}": (lambda c: c.wandb.mode is WandbMode.disabled, "wandb.mode=disabled logs nothing there")
        for key in ("group", "tags", "stall")
    },
    "wandb.name": (lambda c: c.wandb.mode is WandbMode.disabled, "wandb.mode=disabled logs nothing there"),
}


def without_effect(cfg: Config, changed: Iterable[str], job: str) -> list[str]:
    """One line for each of the `changed` keys (those whose typed value differs from the default) that `k3 JOB` would not read."""
    steps, guard = cfg.prove.steps if job == "prove" else cfg.run.steps, cfg.optim.guard
    short = steps <= guard.min_steps, f"a run of {steps} steps has no spikes before optim.guard.min_steps={guard.min_steps}"
    rules = [*IDLE, *RULES.items(), *((f"optim.guard.{key}", (lambda c: short[0], short[1])) for key in SPIKES)]
    lines = []
    for key in changed:
        for place, (idle, why) in rules:
            inside = key == place or key.startswith(place + ".")
            if inside and key != "model.moe.experts" and idle(cfg):
                lines.append(f"{key}: has no effect, because {why}; leave it out")
                break
    return lines
