"""`k3 pretrain`: the main path, from a configuration to a trained model, its pictures and its summary."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

import data
import k3
import parallel
from k3 import ConfigError
from k3.cards import describe
from parallel import ParallelError, checkpoint
from parallel.checkpoint import CheckpointError
from parallel.stages import bubble
from parallel.states import seed_generators
from parallel.together import from_first, gather, over_stages, told_once
from parallel.world import World
from recipes import callbacks as cb
from recipes import processes
from recipes.assemble import assemble
from recipes.callbacks.checkpoints import restore
from recipes.code_version import code_version
from recipes.config import JOBS, Config, Precision, WandbMode
from recipes.console import console, say, show_logs
from recipes.dashboard import wanted_mode
from recipes.errors import UserError
from recipes.initial import Initial, initial
from recipes.interrupts import Interrupts
from recipes.precision import low_precision
from recipes.run_folder import RunFolder, cut_metrics, open_run
from recipes.summary import sizes
from recipes.trainer import Trainer, TrainingError

DTYPES = {Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16, Precision.fp64: torch.float64}
DTYPES |= {Precision.fp8: torch.bfloat16, Precision.mxfp8: torch.bfloat16}  # of parameters, and of all outside quantised products
MISTAKES = (UserError, data.DataError, CheckpointError, ConfigError, ParallelError)  # the user's: all ranks find them together


def pretrain(cfg: Config) -> int:
    """Trains a model on text as `cfg` (from recipes.compose) says, or continues the run in `cfg.run.dir`.

    Every rank calls it, and all go by rank 0's `cfg`. Returns the exit code: 0 when complete or stopped by SIGTERM or SIGUSR1
    with everything saved, 130 after Ctrl-C, 1 when training failed. Raises UserError or DataError for what the user can mend.
    """
    processes.follow(os.environ)
    show_logs()
    if cfg.run.threads is not None:
        torch.set_num_threads(cfg.run.threads)
    # first of all, because it installs the CPU backend, and reading token files imports megatron
    world = parallel.start(cfg.parallel, cfg.run.device.name)
    console.quiet = world.rank > 0
    try:
        with told_once(world, MISTAKES):
            return run(from_first(world, lambda: cfg), world)
    finally:
        parallel.stop()


def run(cfg: Config, world: World) -> int:
    """Opens the run folder, of which rank 0 alone makes, holds and writes files, and trains in it."""
    folder = open_together(cfg, world)
    try:
        if from_first(world, lambda: folder.is_complete):
            say((folder.path / "summary.txt").read_text() + f"{folder.path}: this run is complete")
            return 0
        with Interrupts() as interrupts:
            return train(cfg, folder, interrupts, world)
    except CheckpointError as error:
        raise UserError(str(error)) from error
    except (UserError, data.DataError):
        folder.discard()
        raise
    finally:
        folder.close()


def train(cfg: Config, folder: RunFolder, interrupts: Interrupts, world: World) -> int:
    """The run itself, inside a folder that is this run's own."""
    prepared = prepare(cfg, world)
    heldout = data.heldout(cfg.data, prepared)
    baselines = data.baselines(prepared, heldout)
    at = from_first(world, lambda: position(folder, prepared.key))
    try:
        weights = initial(cfg.run.init, world) if folder.checkpoint is None else None
        trainer = build(cfg, cfg.model, world, prepared, steps=cfg.run.steps, position=at, weights=weights)
        trainer.asked_to_stop = lambda: interrupts.agreed(world)
        dense = dataclasses.replace(k3.preset("dense"), vocab_size=cfg.model.vocab_size)
        cards = describe(cfg.model)
        heads = {name for name, card in cards.items() if card.blocks.per_head}
        model = {"name": folder.path.name, **sizes(cards.values(), cfg.model.moe.top_k)}
        layout = dataclasses.asdict(cfg.parallel)
        compared = math.ceil(cfg.run.steps * cfg.run.compare_dense) or None
        prompt = (cfg.run.sample_prompt, cfg.run.sample_tokens, cfg.run.seed)
        facts = {"data": prepared.key, "model": plain(cfg)["model"], "config": plain(cfg), "code": code_version()}
        facts["wandb"] = from_first(world, lambda: identify(folder, cfg))
        # every rank has as many: each may take part in what all compute, and all are asked at once whether to stop
        trainer.callbacks = [
            cb.Evaluation(heldout, baselines, cfg.run.eval_every, also=compared),
            cb.Balance(k3.balancing(trainer.module)),
            cb.Checkpoints(folder.checkpoints, cfg.checkpoint, facts),
            cb.Metrics(folder.metrics, heads),
            cb.on_first(world, cb.ProgressBar()),
            cb.Sample(folder.path, prepared.tokenizer(), *prompt),
            *(
                [cb.DenseComparison(lambda n: build(cfg, dense, world, prepared, steps=n), heldout, folder.metrics, compared)]
                if compared
                else []
            ),
            cb.Pictures(folder.path, live=facts["wandb"] is not None),
            cb.Export(folder.path / "hf"),
            cb.on_first(world, cb.Summary(folder.path, model, layout)),
            cb.on_first(world, cb.Wandb(cfg.wandb, folder.path, {**plain(cfg), "code": facts["code"]})),
        ]
        for rank, table in over_stages(world, {str(world.groups.pp.rank()): trainer.optimizer.describe()}).items():
            say(f"pipeline rank {rank}:\n{table}" if world.config.pp > 1 else table)
        where = f"{world.size} processes on {world.device.type}" if world.size > 1 else f"{world.device}"
        if cfg.parallel.pp > 1:
            of = data.config.micro_batches(cfg.data, of=world.data_size)
            say(f"pipeline: {of} micro-batches a step; ranks wait at least {bubble(cfg.parallel, of):.0%} of the time")
        if (size := len(data.config.samples_of(cfg.data, cfg.run.steps - 1))) < cfg.data.batch_size:
            say(f"data.ramp: the run ends at {size} sequences a step, before data.batch_size={cfg.data.batch_size} is reached")
        say(f"run {folder.path}: {model['parameters']:,} parameters, {model['active']:,} active a token, on {where}")
        if folder.checkpoint is not None:
            restore(trainer, folder.checkpoint)
            say(f"continuing from {folder.checkpoint}")
        else:
            seed_generators(cfg.run.seed)
            if weights:
                say(f"weights of {cfg.run.init}")
        kept = from_first(world, lambda: cut_metrics(folder.metrics, trainer.progress.step))
        if kept < trainer.progress.step:
            say(f"{folder.metrics} holds {kept} of {trainer.progress.step} steps: the pictures and the summary lack the others")
        complete = trainer.run(cfg.run.steps)
    except TrainingError as error:
        say(f"training stopped: {error}")
        last = from_first(world, lambda: checkpoint.latest(folder.checkpoints))
        say(f"the last good state is {last}" if last else "no checkpoint was written yet")
        return 1
    if complete:
        return 0
    say(f"saved {trainer.results['checkpoint']} after step {trainer.progress.step} of {cfg.run.steps}; continue with\n")
    say(f"    {folder.resume_command}")
    return interrupts.exit_code


def open_together(cfg: Config, world: World) -> RunFolder:
    """The run folder on every rank: rank 0 opens it, as recipes.run_folder.open_run, and the others hear where it stands."""
    opened: list[RunFolder] = []

    def first() -> tuple[Path, Path | None]:
        opened.append(open_run(cfg))
        return opened[0].path, opened[0].checkpoint

    path, last = from_first(world, first)
    return opened[0] if opened else RunFolder(path, None, last)


def prepare(cfg: Config, world: World) -> data.Prepared:
    """The token files: rank 0 makes them where they are missing, the others find them, or where each machine has its own disk
    make them there.

    Raises UserError where ranks read different data.
    """
    made = prepared = from_first(world, lambda: data.prepare(cfg.data, cfg.model.vocab_size))
    found = made.key
    if world.rank > 0:
        try:
            prepared = data.prepare(cfg.data, cfg.model.vocab_size)
            found = prepared.key
        except data.DataError as error:
            found = f"none: {error}"
    for rank, key in enumerate(gather(world, found)):
        if key != made.key:
            raise UserError(
                f"data.corpus={cfg.data.corpus}: rank {rank} finds the prepared data {key}, and rank 0 {made.key}; "
                "give all machines the same files and the same version of tokenizers"
            )
    return prepared


def build(
    cfg: Config,
    model: k3.K3Config,
    world: World,
    prepared: data.Prepared,
    *,
    steps: int,
    position: int = 0,
    weights: Initial | None = None,
) -> Trainer:
    """A trainer at step 0 for a model of `cfg`'s data, optimizer and precision; its stream starts at step `position`.

    `weights`: what its parameters are; None: drawn from `run.seed`.
    """
    parts = assemble(
        model,
        cfg.optim,
        world,
        dtype=DTYPES[cfg.precision.name],
        seed=cfg.run.seed,
        steps=steps,
        activations=cfg.activations,
        low_precision=low_precision(cfg.precision.name),
        weights=weights.weights if weights else None,
    )
    if weights:
        weights.masters(parts.optimizer)
    of = {"rank": world.data_rank, "of": world.data_size, "horizon": parts.objective.horizon}
    return Trainer(parts.model, parts.optimizer, data.stream(cfg.data, prepared, position=position, **of), parts.objective)


def position(folder: RunFolder, data_key: str) -> int:
    """The step at which the data continues. Raises UserError where the run was trained on other data than there is now."""
    if folder.checkpoint is None:
        return 0
    facts = checkpoint.facts(folder.checkpoint)
    if facts["data"] != data_key:
        raise UserError(
            f"{folder.path}: was trained on the prepared data {facts['data']}, and the corpus now gives {data_key}: its files, "
            "or the tokenizers package, have changed. Restore them, or start a new run"
        )
    return facts["data_position"]


def identify(folder: RunFolder, cfg: Config) -> str | None:
    """The id of the W&B run, which the checkpoint that is continued remembers where the folder's own file was lost; None: there
    is none.
    """
    if wanted_mode(cfg.wandb.mode) is WandbMode.disabled:
        return None
    known = checkpoint.facts(folder.checkpoint).get("wandb") if folder.checkpoint else None
    return cb.run_id(folder.path, known)


def plain(cfg: Config) -> dict[str, Any]:
    """The configuration as a dashboard takes it: enums by name."""
    read = OmegaConf.masked_copy(OmegaConf.structured(cfg), list(JOBS["pretrain"]))
    return OmegaConf.to_container(read, enum_to_str=True)  # type: ignore[return-value]
