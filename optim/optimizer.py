"""The optimizer of a run: one step from gradients to weights, in a fixed order.

gradient norm -> guard (skip?) -> clip -> Muon and AdamW on the masters -> weight clip -> working weights -> balancers

Masters, momenta and moments exist for this rank's part of each parameter alone (`parallel/shards.py`); what is decided over the
whole model (the gradient norm, whether the step is skipped, which heads are clipped) comes out the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from optim import schedule, state
from optim.adamw import AdamW
from optim.adamw_kernels import describe
from optim.config import OptimConfig
from optim.grad_norm import clip_coefficient, squared_norm
from optim.guard import Guard
from optim.home import Home
from optim.muon import Muon
from optim.table import Table, assign
from optim.weight_clip import check_targets, clip_weights
from parallel.boxes import Box
from parallel.cards import CardTable
from parallel.cards import Optimizer as Kind
from parallel.clip import ClipTarget
from parallel.shards import Shard, Shards


class Balancing(Protocol):
    """Sets the selection biases of all routers from the counts of a step."""

    def update(self) -> None:
        """Takes the step's counts, over all ranks, into the biases and forgets them."""

    def reset(self) -> None:
        """Forgets the step's counts, once they are reported: the step was skipped."""


@dataclass(frozen=True)
class StepReport:
    """What one step did. Nothing in it waits for a device but what the step itself had to read."""

    step: int  # steps taken with this one, skipped ones included
    lr: float
    grad_norm: float  # of the whole model, before clipping
    clip_coefficient: float
    skipped: bool  # by the guard: weights, moments and biases are as before
    # per Muon parameter, [blocks]: of those that this rank updated, all in a single process; see Muon.step
    update_rms: dict[str, Tensor] = field(default_factory=dict)
    clipped_heads: int = 0  # of the whole model, as the next
    max_logit: float | None = None  # largest attention logit since the last step; None where none was seen
    reason: str | None = None  # why the step was skipped
    idle: str | None = None  # why there was no update to make: as where it is skipped, but nothing is wrong


def build(
    cfg: OptimConfig,
    cards: CardTable,
    *,
    steps: int,
    clip_targets: Sequence[ClipTarget] = (),
    shards: Shards | None = None,
    balancing: Balancing | None = None,
) -> Optimizer:
    """The optimizer of every trained parameter of `cards`, for a run of `steps` steps.

    `shards`: which part of each parameter this rank updates; None: all of all. Raises CardError for a parameter that no optimizer
    takes or whose logical matrices its layout cuts badly, ValueError for a dial outside its range or a clip target that does not
    fit its parameters.
    """
    _validate(cfg)
    schedule.validate(cfg.schedule, steps)
    return Optimizer(cfg, cards, Shards.whole(cards) if shards is None else shards, steps, clip_targets, balancing)


class Optimizer:
    """Made by `build`. A parameter whose gradient is None is left untouched; one whose gradient is zero (as a gradient buffer
    gives it) changes by its momentum and, where its card says so, its weight decay: nothing else.

    Gradients are read from the shards: ZeRO-2's own, else `parameter.main_grad` where it exists, else `parameter.grad`.
    """

    def __init__(
        self,
        cfg: OptimConfig,
        cards: CardTable,
        shards: Shards,
        steps: int,
        clip_targets: Sequence[ClipTarget],
        balancing: Balancing | None,
    ):
        self.cfg, self.steps = cfg, steps
        self.table: Table = assign(cards, cfg)
        self.shards, self.clip_targets, self.balancing = shards, tuple(clip_targets), balancing
        self.parameters = {card.name: parameter for card, parameter in cards.trained()}
        for name, p in self.parameters.items():
            if p.dtype not in (torch.bfloat16, torch.float32, torch.float64):
                raise ValueError(f"{name} is {p.dtype}; the optimizer trains bfloat16, float32 and float64 parameters")
        self._parts = {n: shard for n, shard in shards.items() if shard.start < shard.stop}
        self.home = Home(cfg.offload, shards.device)
        self.masters = {n: master for n, shard in self._parts.items() if (master := self._master(shard)) is not None}
        weights = self._weights()
        self.muon = Muon(cfg.muon, self.table.of(Kind.MUON), weights, shards, self.home)
        self.adamw = AdamW(cfg, self.table.of(Kind.ADAMW), weights, shards, self.home)
        check_targets(self.clip_targets, self.parameters)
        self.guard = Guard(cfg.guard)
        self._step = torch.zeros((), dtype=torch.int64)
        self._skipped = torch.zeros((), dtype=torch.int64)

    @property
    def step_count(self) -> int:
        """Steps taken, skipped ones included: the schedule's position."""
        return int(self._step)

    @property
    def skipped_count(self) -> int:
        return int(self._skipped)

    @torch.no_grad()
    def step(self, *, finite: bool = True, loss: float | None = None, idle: str | None = None) -> StepReport:
        """One update from the gradients that the parameters hold, unless the guard objects (optim/guard.py) or `idle` says why
        there is none to make.

        It does where `finite` (the losses were) is false on any rank. `loss` is the step's, in nats, alike on all ranks but for
        rounding. Every rank must call it. Weights are whole again on all of them afterwards.
        """
        gradients = {n: g for n, shard in self._parts.items() if (g := shard.gradient) is not None}
        norm, finite, loss = self._agree(gradients, finite, loss)
        reason = self.guard.objection(finite=finite, loss=loss, norm=norm)
        lr = self.cfg.lr * schedule.factor(self.cfg.schedule, self.step_count, self.steps)
        scale = clip_coefficient(norm, self.cfg.grad_clip)
        self._step += 1
        if reason is not None or idle is not None:
            self._skipped += reason is not None
            seen = clip_weights(self.clip_targets, {}, self.shards, None)
            if self.balancing is not None:
                self.balancing.reset()
            skipped = reason is not None
            return StepReport(
                self.step_count, lr, norm, scale, skipped, max_logit=seen.max_logit, reason=reason, idle=None if skipped else idle
            )

        weights = self._weights()
        decay = self.cfg.weight_decay
        rms = self.muon.step(weights, gradients, lr=lr, decay=decay, scale=scale)
        self.adamw.step(weights, gradients, lr=lr, decay=decay, scale=scale)
        tau = self.cfg.clip.tau if self.cfg.clip.enabled else None
        clipped = clip_weights(self.clip_targets, weights, self.shards, tau)
        self._publish(gradients.keys() | clipped.names)
        if self.balancing is not None:
            self.balancing.update()
        self.guard.accept(loss=loss, norm=norm)
        return StepReport(self.step_count, lr, norm, scale, False, rms, clipped.heads, clipped.max_logit)

    def _agree(self, gradients: Mapping[str, Tensor], finite: bool, loss: float | None) -> tuple[float, bool, float | None]:
        """What the guard decides from, the same bits on every rank: the norm of the whole model's gradient, whether `finite` held
        on every rank, and the ranks' mean loss (tensor ranks may have rounded it differently).
        """
        counted = [g for n, g in gradients.items() if self.shards[n].counted]
        values = torch.zeros(4, dtype=torch.float64, device=self.shards.device)
        values[0] = squared_norm(counted)
        values[1] = float(not finite)
        if loss is not None:
            values[2], values[3] = loss, 1.0
        square, refusals, losses, count = self.shards.sum(values).tolist()
        return math.sqrt(square), refusals == 0, losses / count if count else None

    def counters(self) -> dict[str, Tensor]:
        """The part of `state_dict` that a skipped step moves on, too; live."""
        return {"step": self._step, "skipped": self._skipped}

    def state_dict(self) -> dict[str, Tensor]:
        """Every tensor that a bitwise continuation needs beside the weights, under flat names; live, not copies."""
        return state.collect(self)

    per_rank = False  # a checkpoint's word (parallel/checkpoint.py): the state is the model's, however it is cut

    def boxes(self) -> Iterator[Box]:
        """This rank's part of `state_dict` in the coordinates of the whole parameters, to be saved or loaded into."""
        return state.boxes(self)

    def loaded(self, anew: int | None = None) -> None:
        """Sets bf16 weights from the masters, after the boxes were loaded into. Every rank must call it."""
        for name, master in self.masters.items():
            if not state.is_rounded(self._parts[name]):
                master.copy_(self._parts[name].weight)  # the state does not hold it twice
        self._publish(self.masters)

    def describe(self) -> str:
        """The printable parameter -> optimizer table, AdamW's kernel, what is offloaded, and how ranks share Muon's work."""
        lines = [self.table.describe()]
        if self.adamw.rows:
            lines.append(f"AdamW by {describe(self.adamw.kernel)}")
        if self.home.offloaded:
            held, freed = state.offloaded_bytes(self)
            there = f"{freed / 1e6:.3g} MB spared the device" if freed else "and so are the weights"
            lines.append(f"offloaded: {held / 1e6:.3g} MB of masters and moments in CPU memory, {there}")
        if self.muon.balance is not None:
            lines.append(self.muon.balance.describe())
        return "\n".join(lines)

    def _master(self, shard: Shard) -> Tensor | None:
        """The tensor that is updated in place of the weight: float32 for a bf16 one; None where the weight is its own master."""
        if not state.is_rounded(shard) and not self.home.offloaded:
            return None
        return self.home.empty_like(shard.weight, torch.float32 if state.is_rounded(shard) else None).copy_(shard.weight)

    def _weights(self) -> dict[str, Tensor]:
        """What is updated: masters where there are some. Looked up at each step: buffers may have replaced a tensor's data."""
        return {n: self.masters[n] if n in self.masters else shard.weight for n, shard in self._parts.items()}

    @torch.no_grad()
    def _publish(self, names: Collection[str]) -> None:
        """Masters to working weights, which every rank then has whole."""
        chosen = [n for n in self.masters if n in names]
        if chosen:
            weights, masters = [self._parts[n].weight for n in chosen], [self.masters[n] for n in chosen]
            # from pinned memory: nothing writes to the masters before the next step, which reads this device first
            torch._foreach_copy_(weights, masters, non_blocking=True)
        self.shards.sync()


def _validate(cfg: OptimConfig) -> None:
    rules = [
        ("lr", cfg.lr, 0 < cfg.lr < math.inf, "must be above 0"),
        ("weight_decay", cfg.weight_decay, cfg.weight_decay >= 0, "must not be negative"),
        ("weight_decay", cfg.weight_decay, cfg.weight_decay * cfg.lr < 1, "must be below 1 / optim.lr"),
        ("grad_clip", cfg.grad_clip, cfg.grad_clip >= 0, "must not be negative; 0 switches clipping off"),
        ("clip.tau", cfg.clip.tau, cfg.clip.tau > 0, "must be above 0; optim.clip.enabled=false switches it off"),
        ("guard.window", cfg.guard.window, cfg.guard.window >= 2, "must be at least 2 steps"),
        (
            "guard.min_steps",
            cfg.guard.min_steps,
            2 <= cfg.guard.min_steps <= cfg.guard.window,
            f"must lie in 2..{cfg.guard.window}, the steps of optim.guard.window",
        ),
        ("guard.deviations", cfg.guard.deviations, cfg.guard.deviations >= 0, "must not be negative"),
        ("guard.grad_norm", cfg.guard.grad_norm, cfg.guard.grad_norm > 1, "must be above 1"),
        ("guard.loss", cfg.guard.loss, cfg.guard.loss > 1, "must be above 1"),
        ("guard.max_skipped", cfg.guard.max_skipped, cfg.guard.max_skipped >= 1, "must be at least 1"),
        ("router.lr_scale", cfg.router.lr_scale, cfg.router.lr_scale >= 0, "must not be negative"),
        ("muon.momentum", cfg.muon.momentum, 0 <= cfg.muon.momentum < 1, "must lie in 0..1, below 1"),
        ("muon.steps", cfg.muon.steps, cfg.muon.steps >= 1, "must be at least 1"),
        ("muon.scale", cfg.muon.scale, cfg.muon.scale > 0, "must be above 0"),
        ("adamw.beta1", cfg.adamw.beta1, 0 <= cfg.adamw.beta1 < 1, "must lie in 0..1, below 1"),
        ("adamw.beta2", cfg.adamw.beta2, 0 <= cfg.adamw.beta2 < 1, "must lie in 0..1, below 1"),
        ("adamw.eps", cfg.adamw.eps, cfg.adamw.eps > 0, "must be above 0"),
    ]
    broken = [f"optim.{name}={value}: {rule}" for name, value, kept, rule in rules if not kept]
    if broken:
        raise ValueError("\n".join(broken))
