"""What a step's rollouts were like, into the metrics of the step."""

from __future__ import annotations

from pathlib import Path

from recipes.callbacks.pictures import blank
from recipes.rewards.judge import Judge
from recipes.rl.rollouts import Rollouts
from recipes.run_folder import read_metrics
from recipes.trainer import Callback, StepResult, Trainer


class RolloutMetrics(Callback):
    """Adds `rl/...` to the metrics, and draws rollouts.png at the end. Closes the judge."""

    def __init__(self, rollouts: Rollouts, folder: Path, judge: Judge):
        self.rollouts, self.folder, self.judge = rollouts, folder, judge

    def step(self, trainer: Trainer, result: StepResult) -> None:
        result.metrics |= self.rollouts.metrics

    def close(self, trainer: Trainer) -> None:
        self.judge.close()

    def complete(self, trainer: Trainer) -> None:
        if trainer.objective.world.rank > 0:
            return
        records = [r for r in read_metrics(self.folder / "metrics.jsonl") if "rl/reward" in r]
        if not records:
            return
        figure = blank(8, 8)
        top, middle, bottom = figure.subplots(3, sharex=True)
        steps = [r["step"] for r in records]
        domains = sorted({key for r in records for key in r if key.startswith("rl/score/")})
        for key in domains:
            top.plot(*zip(*((r["step"], r[key]) for r in records if key in r)), linewidth=1, label=key.removeprefix("rl/score/"))
        top.plot(steps, [r["rl/reward"] for r in records], color="black", linewidth=2, label="reward, with the length budget")
        middle.plot(steps, [r["rl/tokens"] for r in records], label="tokens an answer")
        bottom.semilogy(
            steps, [max(r["policy/mismatch"] or 0, 1e-12) for r in records], label="largest log-probability difference"
        )
        bottom.semilogy(steps, [max(r["policy/entropy"] or 0, 1e-12) for r in records], label="entropy (nats a token)")
        for axes in (top, middle, bottom):
            axes.grid(alpha=0.3)
            axes.legend()
        bottom.set(xlabel="step")
        figure.savefig(self.folder / "rollouts.png", dpi=120)
        trainer.results.setdefault("pictures", {})["rollouts"] = self.folder / "rollouts.png"
