"""Typed keys that nothing would read are refused with the reason."""

from __future__ import annotations

import pytest

from k3.activations import full
from recipes.compose import compose
from recipes.errors import UserError
from recipes.unused import RULES, SPIKES
from tests.golden.vectors import FOLDER

IDLE = {
    "model.kda": ["model.attention=mla", "model.kda.heads=7"],
    "model.kda.lower_bound": ["model=linear_48b", "model.kda.lower_bound=-4"],
    "model.residual_block": ["model.residual=sum", "model.residual_block=2"],
    "model.situ_beta": ["model.activation=swiglu", "model.situ_beta=3"],
    "model.situ_linear_beta": ["model.activation=swiglu", "model.situ_linear_beta=3"],
    "model.init_std": [f"run.init={FOLDER}", "model.init_std=0.1"],
    "model.mtp_weight": ["model.mtp_layers=0", "model.mtp_weight=0.3"],
    "model.dense_size": ["model.dense_layers=0", "model.dense_size=96"],
    "model.moe.latent_size": ["model.latent=false", "model.moe.latent_size=96"],
    "model.moe.bins": ["model.moe.balance=bias", "model.moe.bins=10"],
    "model.moe.ema": ["model.moe.balance=none", "model.moe.ema=0.5"],
    "model.moe.bias_step": ["model.moe.bias_step=0.1"],
    "model.moe.aux_weight": ["model.moe.aux_weight=0.1"],
    "model.moe": ["model=dense", "model.moe.scaling=2.0"],
    "optim.router": ["model=dense", "optim.router.lr_scale=1.0"],
    "optim.muon": ["optim=adamw", "optim.muon.per_head=false"],
    "optim.muon.distribution": ["parallel.zero=1", "optim.muon.distribution=gather"],
    "optim.muon.nesterov": ["optim.muon.momentum=0", "optim.muon.nesterov=false"],
    "optim.clip.tau": ["optim.clip.enabled=false", "optim.clip.tau=50"],
    "optim.guard.window": ["optim.guard.enabled=false", "optim.guard.window=64"],
    "optim.guard.min_steps": ["optim.guard.enabled=false", "optim.guard.min_steps=9"],
    "optim.guard.deviations": ["optim.guard.enabled=false", "optim.guard.deviations=9"],
    "optim.guard.grad_norm": ["optim.guard.enabled=false", "optim.guard.grad_norm=9"],
    "optim.guard.loss": ["optim.guard.enabled=false", "optim.guard.loss=9"],
    "optim.schedule.decay": ["optim.schedule.decay=0.5"],
    "optim.schedule.min_lr": ["optim.schedule.name=constant", "optim.schedule.min_lr=0.5"],
    "data.ramp.increment": ["data.ramp.increment=2"],
    "data.ramp.samples": ["data.ramp.samples=100"],
    "parallel.bucket": ["parallel.dp=2", "parallel.overlap=false", "parallel.bucket=100"],
    "parallel.zero": ["parallel.zero=0"],
    "parallel.overlap": ["parallel.overlap=false"],
    "activations.attention": ["activations.layer=recompute", "activations.attention=recompute"],
    "activations.feed_forward": ["activations=full", "activations.feed_forward=recompute"],
    "activations.head": ["activations.head_chunk=64", "activations.head=recompute"],
    "qat.rule": ["qat.rule=floor"],
    "data.long.facts": ["data.long.facts=4"],
    "data.long.questions": ["data.long.questions=1"],
    "checkpoint.keep_every": ["checkpoint.every=0", "checkpoint.keep_every=10"],
    "run.sample_prompt": ["run.sample_tokens=0", "run.sample_prompt=class"],
    "wandb.project": ["wandb.mode=disabled", "wandb.project=x"],
    "wandb.group": ["wandb.mode=disabled", "wandb.group=x"],
    "wandb.tags": ["wandb.mode=disabled", "wandb.tags=[x]"],
    "wandb.stall": ["wandb.mode=disabled", "wandb.stall=3"],
    "wandb.name": ["wandb.mode=disabled", "wandb.name=x"],
}


@pytest.mark.parametrize("key", SPIKES)
def test_a_run_too_short_for_spikes(key: str) -> None:
    compose(["run.steps=40", f"optim.guard.{key}=40"])
    for words, job in ((["run.steps=20"], "pretrain"), ([], "prove")):
        with pytest.raises(UserError, match=rf"optim\.guard\.{key}: has no effect, because a run of \d+ steps has no spikes"):
            compose([*words, f"optim.guard.{key}=40"], job=job)


def test_every_rule_has_a_case() -> None:
    assert set(IDLE) == set(RULES)


@pytest.mark.parametrize("rule", IDLE)
def test_idle_keys_are_refused(rule: str) -> None:
    *others, word = IDLE[rule]
    compose(others)  # the switch alone is fine
    with pytest.raises(UserError, match="has no effect, because") as caught:
        compose([*others, word])
    assert str(caught.value).startswith(word.split("=")[0])


def test_the_default_value_is_no_offence() -> None:
    compose(["optim=adamw", "optim.muon.per_head=true"])


def test_a_policy_may_be_widened() -> None:
    assert compose(["activations=selective", "activations.layer=recompute"]).activations.effective() == full()


def test_the_last_word_for_a_key_counts() -> None:
    assert compose(["run.steps=1", "run.steps=2"]).run.steps == 2
