"""What a step's rollouts were like, into the metrics of the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.callbacks.pictures import blank
from recipes.console import say
from recipes.rewards.judge import Judge
from recipes.rl.rollouts import Rollouts
from recipes.run_folder import read_metrics
from recipes.trainer import Callback, StepResult, Trainer

PROBLEMS = "rl/problems/"


def failures(records: Sequence[Mapping[str, Any]]) -> str:
    """What went wrong with judging, by kind, in words; nothing where all went well."""
    found: Counter[str] = Counter()
    for record in records:
        found.update({key.removeprefix(PROBLEMS): count for key, count in record.items() if key.startswith(PROBLEMS)})
    words = ", ".join(f"{count:,} {kind}" for kind, count in sorted(found.items()))
    return f"no verdict on {words}" if words else ""


class RolloutMetrics(Callback):
    """Adds `rl/...` to the metrics, and draws rollouts.png at the end. Closes the judge."""

    def __init__(self, rollouts: Rollouts, folder: Path, judge: Judge):
        self.rollouts, self.folder, self.judge = rollouts, folder, judge
        self.warned = False

    def step(self, trainer: Trainer, result: StepResult) -> None:
        found = self.rollouts.metrics
        result.metrics |= found
        result.words.append(f"reward {found['rl/reward']:.3f}")
        if found["rl/cut"]:
            result.words.append(f"{found['rl/cut']:.0%} of the answers cut")
        if failed := failures([found]):
            result.words.append(failed)
        if found["rl/cut"] == 1 and not self.warned:
            self.warned = True
            most = f"rl.max_new_tokens={self.rollouts.cfg.max_new_tokens}"
            say(
                f"step {result.step}: every answer was cut at {most}, and what is cut is worth nothing (the tokens that close an "
                "answer count); give more, or a model that ends its answers"
            )

    def close(self, trainer: Trainer) -> None:
        self.judge.close()

    def complete(self, trainer: Trainer) -> None:
        if trainer.objective.world.rank > 0:
            return
        records = [r for r in read_metrics(self.folder / "metrics.jsonl") if "rl/reward" in r]
        if not records:
            return
        if failed := failures(records):
            trainer.results.setdefault("report", []).append(f"rewards: of the whole run {failed}")
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
