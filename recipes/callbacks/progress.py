"""The progress bar: loss, tokens/s, time left. Plain lines where the output is no terminal."""

from __future__ import annotations

import time

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from recipes.console import console, say
from recipes.trainer import Callback, StepResult, Trainer

LINES = 20  # plain lines in a run


class ProgressBar(Callback):
    def __init__(self) -> None:
        self.bar: Progress | None = None
        self.tokens_per_second: float | None = None  # smoothed over about ten steps
        self.began = 0.0
        self.first = 0

    def start(self, trainer: Trainer) -> None:
        self.began, self.first = time.perf_counter(), trainer.progress.step
        if console.is_terminal:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
            self.bar = Progress(*columns, console=console)
            self.task = self.bar.add_task("", total=trainer.steps, completed=self.first)
            self.bar.start()

    def step(self, trainer: Trainer, result: StepResult) -> None:
        now = result.tokens / result.seconds
        self.tokens_per_second = now if self.tokens_per_second is None else 0.9 * self.tokens_per_second + 0.1 * now
        # from the clock and not from the steps' own time: evaluations count too
        left = (time.perf_counter() - self.began) / (result.step - self.first) * (trainer.steps - result.step)
        skipped = f", skipped: {result.report.reason}" if result.report.skipped else ""
        idle = f", no update: {result.report.idle}" if result.report.idle else ""
        words = ", ".join([f"loss {result.losses[0]:.4f}", *result.words])
        text = f"{words}, {self.tokens_per_second:,.0f} tokens/s, {clock(left)} left{skipped}{idle}"
        if self.bar is not None:
            self.bar.update(self.task, completed=result.step, description=text)
        elif result.step % max(1, trainer.steps // LINES) == 0 or result.step in (self.first + 1, trainer.steps) or skipped:
            say(f"step {result.step}/{trainer.steps}: {text}")

    def end(self, trainer: Trainer) -> None:
        self.close(trainer)

    def close(self, trainer: Trainer) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def clock(seconds: float) -> str:
    """`1:02:03`, or `2:03` under an hour."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
