"""The learning rate's schedule as a pure function of the step (report 3: cosine with 1 % linear warm-up)."""

from __future__ import annotations

import math

from optim.config import ScheduleConfig, ScheduleName


def factor(cfg: ScheduleConfig, step: int, steps: int) -> float:
    """What multiplies `optim.lr` at `step` (from 0) of a run of `steps`.

    Linear warm-up over max(1, round(warmup * steps)) steps that ends at 1; then cosine or constant, or (wsd) constant and
    a linear decay over the last round(decay * steps) steps. The last step, and any later one, is at `min_lr` (constant: 1), but
    for a warm-up that takes all steps.
    """
    warmup = max(1, round(cfg.warmup * steps))
    done = min(step + 1, steps)
    if done <= warmup:
        return done / warmup
    if cfg.name is ScheduleName.constant:
        return 1.0
    if cfg.name is ScheduleName.wsd:
        length = max(1, round(cfg.decay * steps))
        progress = max(0.0, (done - (steps - length)) / length)
        return 1.0 - (1.0 - cfg.min_lr) * progress
    progress = (done - warmup) / (steps - warmup)
    return cfg.min_lr + (1.0 - cfg.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))


def validate(cfg: ScheduleConfig, steps: int) -> None:
    """Raises ValueError, naming the field, for a schedule that cannot be followed over `steps` steps."""
    if steps < 1:
        raise ValueError(f"run.steps={steps} must be at least 1")
    for name in ("warmup", "min_lr", "decay"):
        if not 0.0 <= getattr(cfg, name) <= 1.0:
            raise ValueError(f"optim.schedule.{name}={getattr(cfg, name)} must be a fraction, 0 to 1")
    if cfg.name is ScheduleName.wsd and cfg.decay == 0:
        raise ValueError("optim.schedule.decay=0.0: wsd decays at the end; give optim.schedule.name=constant for none")
    if cfg.name is ScheduleName.wsd and cfg.warmup + cfg.decay > 1.0:
        raise ValueError(f"optim.schedule.warmup={cfg.warmup} and decay={cfg.decay} overlap; their sum must not exceed 1")
