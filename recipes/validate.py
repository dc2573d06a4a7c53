"""Everything about a composed configuration that this version cannot honour, in one message (design principle 5)."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from pathlib import Path

from data.config import batch_sizes, micro_batch
from data.config import validate as validate_data
from data.errors import DataError
from data.tasks.config import validate as validate_tasks
from k3 import qat
from k3.config import ConfigError
from k3.layout import check_layout
from k3.qat import Qat
from optim.config import OptimizerName, RouterOptimizer, ScheduleName
from parallel.config import ParallelConfig, ParallelError, check_sizes, data_parallel_size, world_size
from parallel.stages import group_size
from recipes import precision, processes
from recipes.coming import tokenizer_beside
from recipes.config import Config, Device, WandbConfig
from recipes.errors import UserError, shown
from recipes.phases.rules import ANSWERING, SAMPLING
from recipes.phases.rules import refusals as phase_refusals
from recipes.rewards.config import validate as validate_rewards

MOST_ON_CPU = 8  # processes: more only wait for each other's cores
WITHOUT_QAT = ("pretrain", "extend")  # jobs
Refusal = tuple[str, object, str]  # the key, its value, what is wrong and the fix


def check(cfg: Config, *, elsewhere: bool = False, job: str = "pretrain") -> None:
    """Raises UserError with every refusal of `k3 JOB`, one a line. Reads no data and starts nothing.

    elsewhere: the run is for other machines, whose devices are not known here.
    """
    lines: list[str] = []
    answers = (lambda: validate_tasks(cfg.tasks), lambda: validate_rewards(cfg.rewards)) if job in ANSWERING else ()
    for rule in (cfg.model.validate, lambda: check_sizes(cfg.parallel), lambda: validate_data(cfg.data), *answers):
        try:
            rule()
        except (ConfigError, ParallelError, DataError, UserError) as error:
            lines.extend(str(error).splitlines())
    rules = (*_precision(cfg, elsewhere), *_qat(cfg, job), *_data(cfg), *_optim(cfg), *_run(cfg), *phase_refusals(cfg, job))
    lines.extend(f"{key}={shown(value)}: {text}" for key, value, text in rules)
    if lines:
        raise UserError("\n".join(lines))


def check_training(cfg: Config) -> None:
    """Raises UserError for a layout that the model, the batch, the run or the processes there are do not fit.

    `cfg` has passed `check`, which other jobs share; `parallel.dp` may still be null.
    """
    started = processes.count(os.environ)
    layout = dataclasses.replace(cfg.parallel, dp=data_parallel_size(cfg.parallel, started))
    size = world_size(layout)
    lines: list[str] = []
    if started is not None and size != started:
        lines.append(
            f"parallel: tp * pp * cp * dp = {layout.tp} * {layout.pp} * {layout.cp} * {layout.dp} = {size} processes, but "
            f"{started} were started; start as many as the layout needs, or give sizes that fit"
        )
    lines += misfits(cfg, layout)
    if size > 1 and cfg.run.compare_dense > 0:
        lines.append(
            f"run.compare_dense={cfg.run.compare_dense}: compares at equal time in one process, and this run has {size}; "
            "leave it out, or run in one process"
        )
    if lines:
        raise UserError("\n".join(lines))


def check_fit(cfg: Config) -> None:
    """Raises UserError for a layout that the model or the batch do not fit, however many processes there are.

    `cfg` has passed `check`; `parallel.dp` may still be null.
    """
    if lines := list(misfits(cfg, dataclasses.replace(cfg.parallel, dp=data_parallel_size(cfg.parallel)))):
        raise UserError("\n".join(lines))


def misfits(cfg: Config, layout: ParallelConfig) -> Iterator[str]:
    """Why the model and the batch do not fit `layout`, which has its `dp`, a line each."""
    of = layout.dp or 1
    rules = [lambda: check_sizes(layout), lambda: check_layout(cfg.model, layout, length=cfg.data.seq_length)]
    if cfg.phase not in (*SAMPLING, "eval"):  # whose rows are as many as they come
        rules += [lambda: validate_data(cfg.data, of=of), lambda: _check_groups(cfg, layout)]
    for rule in rules:
        try:
            rule()
        except (ParallelError, DataError) as error:
            yield from str(error).splitlines()


def _check_groups(cfg: Config, layout: ParallelConfig) -> None:
    if layout.vpp == 1:
        return
    of = layout.dp or 1
    for size in batch_sizes(cfg.data):
        most = size // (of * layout.pp)
        fix = f"give data.micro_batch_size={most}" if most else f"give data.batch_size={of * layout.pp} data.micro_batch_size=1"
        if not most and size < cfg.data.batch_size:
            fix = f"give data.ramp.start={of * layout.pp} data.micro_batch_size=1"
        group_size(layout, size // (micro_batch(cfg.data, of) * of), fix=fix)


def check_devices(cfg: Config) -> None:
    """Raises UserError where this machine cannot start the processes of the layout. `parallel.dp` must be set."""
    size, launched = world_size(cfg.parallel), processes.count(os.environ) is not None
    if size == 1:
        return
    p = cfg.parallel
    needs = f"parallel: tp * pp * cp * dp = {p.tp} * {p.pp} * {p.cp} * {p.dp} takes {size} processes"
    if not _cuda():
        if size > MOST_ON_CPU:
            raise UserError(f"{needs}, and on CPUs at most {MOST_ON_CPU} make sense; give smaller sizes")
        return
    import torch

    there = torch.cuda.device_count()
    if size > there and not launched:
        raise UserError(
            f"{needs}, a GPU each, and this machine has {there}; give smaller sizes, or start the command on several machines "
            "with torchrun or srun"
        )


def check_memory(cfg: Config, *, on_cpu: bool = False, width: int = 4) -> None:
    """Raises UserError for a model that cannot fit a CPU machine: without it, the kernel would kill the process, or another.

    on_cpu: whether it runs there even where CUDA is. width: bytes of a number. Counts every process of the layout, except where
    a launcher has started them: then they may lie on other machines.
    """
    if not on_cpu and _cuda():
        return  # torch itself says so there, and harms nothing
    import psutil

    from k3.cards import describe
    from parallel.cards import Group, TensorAxis

    p, size = cfg.parallel, 1 if processes.count(os.environ) is not None else world_size(cfg.parallel)
    parameters = least = 0
    for card in describe(cfg.model).values():
        numel = math.prod(card.shape)
        expert, cut = card.placement.group is Group.EXPERT, card.placement.tensor in (TensorAxis.ROWS, TensorAxis.COLS)
        copies = max(1, size // p.pp // (p.ep if expert else p.tp if cut else 1))
        parameters += numel
        least += numel * (2 * copies + 1) * width  # every copy has a weight and a gradient; a momentum exists once at least
    there = psutil.virtual_memory().total
    if least > there:
        raise UserError(
            f"model: its {parameters:,} parameters take at least {least / 2**30:,.0f} GiB with gradients and momentum in {size} "
            f"process{'es' if size > 1 else ''}, and this machine has {there / 2**30:,.0f} GiB; give a smaller one, such as "
            "model=nano"
        )


def _precision(cfg: Config, elsewhere: bool) -> Iterator[Refusal]:
    yield from precision.refusals(cfg, elsewhere=elsewhere)
    if cfg.run.device is Device.cuda and not elsewhere and not _cuda():
        yield "run.device", cfg.run.device, "there is no CUDA device; give run.device=auto"


def _qat(cfg: Config, job: str) -> Iterator[Refusal]:
    if job in WITHOUT_QAT and cfg.qat.name is not Qat.none:
        yield (
            "qat",
            cfg.qat.name,
            "quantisation-aware training belongs to the phases after pretraining (report 4.1.4); give qat=none",
        )
        return
    low = None if job == "prove" else precision.low_precision(cfg.precision.name)  # which does not read it
    yield from qat.refusals(cfg.model, cfg.qat, low)


def _cuda() -> bool:
    import torch  # only where the answer matters: it takes a second

    return torch.cuda.is_available()


def _data(cfg: Config) -> Iterator[Refusal]:
    d = cfg.data
    least = 2 + cfg.model.mtp_layers
    if 1 <= d.seq_length < least:
        yield "data.seq_length", d.seq_length, f"must be at least {least}: the last of {least - 1} predictions needs a target"
    if d.corpus != "stdlib" and not Path(d.corpus).exists():
        yield "data.corpus", d.corpus, "no such folder or file; give a folder of text, a .jsonl file, or stdlib"
    # a chain's later run: what it begins with is yet to come, and its tokenizer with it
    coming = (
        cfg.run.init is not None and not Path(cfg.run.init).exists() and Path(d.tokenizer) == tokenizer_beside(Path(cfg.run.init))
    )
    if d.tokenizer != "train" and not coming and not Path(d.tokenizer).is_file():
        yield "data.tokenizer", d.tokenizer, "no such file; give a tokenizer.json, or train"


def _optim(cfg: Config) -> Iterator[Refusal]:
    o = cfg.optim
    for name, value in (("lr", o.lr), ("muon.scale", o.muon.scale), ("adamw.eps", o.adamw.eps), ("clip.tau", o.clip.tau)):
        if not value > 0:  # also refuses nan
            yield f"optim.{name}", value, "must be positive"
    if o.lr > 0 and o.lr * o.weight_decay >= 1:
        yield "optim.weight_decay", o.weight_decay, f"must be below 1 / optim.lr = {1 / o.lr:g}: a step would turn weights around"
    if o.name is OptimizerName.adamw and o.router.optimizer is RouterOptimizer.muon:
        yield "optim.router.optimizer", o.router.optimizer, "contradicts optim=adamw; leave it at adamw or give optim=muon"
    for name, value in (("weight_decay", o.weight_decay), ("grad_clip", o.grad_clip), ("router.lr_scale", o.router.lr_scale)):
        if not value >= 0:
            yield f"optim.{name}", value, "must be at least 0"
    for name, value in (("muon.momentum", o.muon.momentum), ("adamw.beta1", o.adamw.beta1), ("adamw.beta2", o.adamw.beta2)):
        if not 0 <= value < 1:
            yield f"optim.{name}", value, "must lie in [0, 1)"
    s = o.schedule
    for name, value in (("warmup", s.warmup), ("min_lr", s.min_lr), ("decay", s.decay)):
        if not 0 <= value <= 1:
            yield f"optim.schedule.{name}", value, "is a fraction: must lie in [0, 1]"
    if s.name is ScheduleName.wsd and s.decay <= 0:
        yield (
            "optim.schedule.decay",
            s.decay,
            "wsd decays at the end: must be above 0; give optim.schedule.name=constant for none",
        )
    if s.name is ScheduleName.wsd and s.warmup + s.decay > 1:
        yield "optim.schedule.decay", s.decay, f"overlaps with optim.schedule.warmup={s.warmup}: their sum must not exceed 1"
    g = o.guard
    for name, ratio in (("grad_norm", g.grad_norm), ("loss", g.loss)):
        if not ratio > 1:
            yield f"optim.guard.{name}", ratio, "is a factor above the median: must be above 1"
    if not g.deviations >= 0:
        yield "optim.guard.deviations", g.deviations, "must be at least 0"
    if g.window < 2:
        yield "optim.guard.window", g.window, "must be at least 2 steps"
    elif not 2 <= g.min_steps <= g.window:
        yield "optim.guard.min_steps", g.min_steps, f"must lie in [2, {g.window}], the steps of optim.guard.window"
    if g.max_skipped < 1:
        yield "optim.guard.max_skipped", g.max_skipped, "must be at least 1"
    if o.muon.steps < 1:
        yield "optim.muon.steps", o.muon.steps, "must be at least 1"


def _run(cfg: Config) -> Iterator[Refusal]:
    r, c = cfg.run, cfg.checkpoint
    for key, value, least in (
        ("run.steps", r.steps, 1),
        ("run.seed", r.seed, 0),
        ("run.eval_every", r.eval_every, 0),
        ("run.sample_tokens", r.sample_tokens, 0),
        ("checkpoint.every", c.every, 0),
        ("checkpoint.keep_last", c.keep_last, 1),
        ("checkpoint.keep_every", c.keep_every, 0),
    ):
        if value < least:
            yield key, value, f"must be at least {least}"
    if c.every > 0 and c.keep_every > 0 and c.keep_every % c.every:
        yield "checkpoint.keep_every", c.keep_every, f"must be a multiple of checkpoint.every={c.every}: no other is saved"
    if not 0 <= r.compare_dense <= 1:
        yield "run.compare_dense", r.compare_dense, "is a share of the run: must lie in [0, 1]"
    if r.compare_dense and r.init is not None:
        yield (
            "run.compare_dense",
            r.compare_dense,
            "trains a dense model from scratch, which run.init does not; leave it out",
        )
    yield from _wandb(cfg.wandb)
    if r.threads is not None and r.threads < 1:
        yield "run.threads", r.threads, "must be at least 1, or null for one a physical core"
    if r.sample_tokens and not r.sample_prompt:
        yield "run.sample_prompt", repr(r.sample_prompt), "a sample continues something; give some text, or run.sample_tokens=0"
    if r.dir is not None:
        there = next(p for p in (Path(r.dir), *Path(r.dir).absolute().parents) if p.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            yield "run.dir", r.dir, f"{there} is no folder that can be written to; give another"


def _wandb(w: WandbConfig) -> Iterator[Refusal]:
    """What W&B itself would refuse, minutes later."""
    if bad := sorted(set(w.project) & set("/\\#?%:")):
        yield "wandb.project", w.project, f"the name of a W&B project cannot hold {' '.join(bad)}"
    for key, text in (("project", w.project), ("name", w.name), ("group", w.group)):
        if text is not None and not 1 <= len(text.strip()) <= 128:
            yield f"wandb.{key}", repr(text), "must have 1 to 128 characters"
    if wrong := [tag for tag in w.tags if not 1 <= len(tag.strip()) <= 64]:
        yield "wandb.tags", wrong, "a tag has 1 to 64 characters"
    if w.stall < 0:
        yield "wandb.stall", w.stall, "minutes without a step; must be at least 0, which alerts of none"
