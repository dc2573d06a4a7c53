"""A training run of any phase, from a configuration to a trained model, its pictures and its summary: the main path."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

import data
import k3
import parallel
from data.config import micro_batches
from k3 import ConfigError
from k3.cards import describe
from parallel import ParallelError, checkpoint
from parallel.checkpoint import CheckpointError
from parallel.stages import bubble
from parallel.states import seed_generators
from parallel.together import from_first, over_stages, told_once
from parallel.world import World
from recipes import callbacks as cb
from recipes import processes
from recipes.assemble import DTYPES, Parts, assemble
from recipes.callbacks.checkpoints import restore
from recipes.code_version import code_version
from recipes.coming import TOKENIZER
from recipes.compose import sections
from recipes.config import Config, WandbMode
from recipes.console import console, say, show_logs
from recipes.dashboard import wanted_mode
from recipes.errors import UserError
from recipes.initial import Initial, initial
from recipes.interrupts import Interrupts
from recipes.phases import TRAINS, open_phase
from recipes.precision import low_precision
from recipes.run_folder import RunFolder, cut_metrics, open_run
from recipes.summary import sizes
from recipes.trainer import TrainingError

MISTAKES = (UserError, data.DataError, CheckpointError, ConfigError, ParallelError)  # the user's: all ranks find them together


def train(cfg: Config) -> int:
    """Trains a model in the phase `cfg.phase` as `cfg` (from recipes.compose) says, or continues the run in `cfg.run.dir`.

    Every rank calls it, and all go by rank 0's `cfg`. Returns the exit code: 0 when complete or stopped by SIGTERM or SIGUSR1
    with everything saved, 130 after Ctrl-C, 1 when training failed. Raises UserError or DataError for what the user can mend.
    """
    with together(cfg) as (cfg, world):
        return run(cfg, world)


@contextmanager
def together(cfg: Config) -> Iterator[tuple[Config, World]]:
    """The ranks of `cfg`'s layout, with rank 0's `cfg` on all; the first alone is heard, and mistakes are told once."""
    processes.follow(os.environ)
    show_logs()
    if cfg.run.threads is not None:
        torch.set_num_threads(cfg.run.threads)
    # first of all, because it installs the CPU backend, and reading token files imports megatron
    world = parallel.start(cfg.parallel, cfg.run.device.name)
    console.quiet = world.rank > 0
    try:
        with told_once(world, MISTAKES):
            yield from_first(world, lambda: cfg), world
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
            return run_in(cfg, folder, interrupts, world)
    except CheckpointError as error:
        raise UserError(str(error)) from error
    except (UserError, data.DataError):
        folder.discard()
        raise
    finally:
        folder.close()


def run_in(cfg: Config, folder: RunFolder, interrupts: Interrupts, world: World) -> int:
    """The run itself, inside a folder that is this run's own."""
    phase = open_phase(cfg, world)
    at = from_first(world, lambda: position(folder, phase.key))
    try:
        weights = initial(cfg.run.init, world) if folder.checkpoint is None else None
        trainer = phase.trainer(build(cfg, world, weights), at)
        trainer.asked_to_stop = lambda: interrupts.agreed(world)
        cards = describe(cfg.model)
        heads = {name for name, card in cards.items() if card.blocks.per_head}
        model = {"name": folder.path.name, **sizes(cards.values(), cfg.model.moe.top_k)}
        layout = dataclasses.asdict(cfg.parallel)
        prompt = (cfg.run.sample_prompt, cfg.run.sample_tokens, cfg.run.seed)
        facts = {"data": phase.key, "model": plain(cfg)["model"], "config": plain(cfg), "code": code_version()}
        facts["wandb"] = from_first(world, lambda: identify(folder, cfg))
        # every rank has as many: each may take part in what all compute, and all are asked at once whether to stop
        trainer.callbacks = [
            *phase.measures(folder),
            cb.Balance(k3.balancing(trainer.module)),
            cb.Checkpoints(folder.checkpoints, cfg.checkpoint, facts),
            cb.Metrics(folder.metrics, heads),
            cb.on_first(world, cb.ProgressBar()),
            cb.Sample(folder.path, phase.tokenizer, *prompt),
            *phase.finale(folder),
            cb.Pictures(folder.path, live=facts["wandb"] is not None),
            cb.Export(folder.path / "hf", phase.tokenizer),
            cb.on_first(world, cb.Summary(folder.path, model, layout)),
            cb.on_first(world, cb.Wandb(cfg.wandb, folder.path, {**plain(cfg), "code": facts["code"]})),
        ]
        for rank, table in over_stages(world, {str(world.groups.pp.rank()): trainer.optimizer.describe()}).items():
            say(f"pipeline rank {rank}:\n{table}" if world.config.pp > 1 else table)
        where = f"{world.size} processes on {world.device.type}" if world.size > 1 else f"{world.device}"
        if cfg.parallel.pp > 1:
            of = micro_batches(cfg.data, of=world.data_size)
            say(f"pipeline: {of} micro-batches a step; ranks wait at least {bubble(cfg.parallel, of):.0%} of the time")
        for line in phase.lines:
            say(line)
        say(f"run {folder.path}: {model['parameters']:,} parameters, {model['active']:,} active a token, on {where}")
        from_first(world, lambda: phase.tokenizer.save(folder.path / TOKENIZER))  # for phases that begin with this model
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


def build(cfg: Config, world: World, weights: Initial | None = None) -> Parts:
    """Model, optimizer and objective at step 0. `weights`: what its parameters are; None: drawn from `run.seed`."""
    parts = assemble(
        cfg.model,
        cfg.optim,
        world,
        dtype=DTYPES[cfg.precision.name],
        seed=cfg.run.seed,
        steps=cfg.run.steps,
        activations=cfg.activations,
        low_precision=low_precision(cfg.precision.name),
        qat=cfg.qat,
        weights=weights.weights if weights else None,
        trains=TRAINS.get(cfg.phase),
    )
    if weights:
        weights.masters(parts.optimizer)
    return parts


def open_together(cfg: Config, world: World) -> RunFolder:
    """The run folder on every rank: rank 0 opens it, as recipes.run_folder.open_run, and the others hear where it stands."""
    opened: list[RunFolder] = []

    def first() -> tuple[Path, Path | None]:
        opened.append(open_run(cfg))
        return opened[0].path, opened[0].checkpoint

    path, last = from_first(world, first)
    return opened[0] if opened else RunFolder(path, None, last, cfg.phase)


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
    read = OmegaConf.masked_copy(OmegaConf.structured(cfg), sections(cfg))
    return OmegaConf.to_container(read, enum_to_str=True)  # type: ignore[return-value]
