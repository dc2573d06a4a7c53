"""Three pictures at the end of a run: the losses, the experts' load over time, and which blocks each layer reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import k3
from parallel.together import over_stages
from recipes.console import say
from recipes.run_folder import read_metrics
from recipes.trainer import Callback, StepResult, Trainer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Pictures(Callback):
    """loss.png, experts.png (where there are experts) and residuals.png (with Attention Residuals), from metrics.jsonl: at the
    end and, if `live`, after each evaluation.

    Rank 0 draws; the other pipeline ranks tell it what their layers read. From the file and not from memory, so that a resumed
    run's pictures show all of it. `results["pictures"]`: name -> file of those just drawn.
    """

    def __init__(self, folder: Path, *, live: bool = False):
        self.folder, self.live = folder, live

    def step(self, trainer: Trainer, result: StepResult) -> None:
        if self.live and "heldout_loss" in result.metrics and result.step < trainer.steps:
            self.draw(trainer)

    def complete(self, trainer: Trainer) -> None:
        if drawn := self.draw(trainer):
            say(f"pictures: {', '.join(path.name for path in drawn.values())} in {self.folder}")

    def draw(self, trainer: Trainer) -> dict[str, Path]:
        """On rank 0, of all ranks' weights. Every rank must call it."""
        weights = {name: w.tolist() for name, w in k3.residual_weights(trainer.module).items()}
        weights = over_stages(trainer.objective.world, weights)
        if trainer.objective.world.rank > 0:
            return {}
        records = list(read_metrics(self.folder / "metrics.jsonl"))
        figures = {
            "loss.png": loss(records, trainer.results.get("dense"), trainer.objective.unit),
            "experts.png": experts(records),
            "residuals.png": residuals(weights),
        }
        drawn = {}
        for name, figure in figures.items():
            if figure is not None:
                figure.savefig(self.folder / name, dpi=120)
                drawn[name.removesuffix(".png")] = self.folder / name
        trainer.results["pictures"] = drawn
        return drawn


def blank(width: float, height: float) -> Figure:
    # not pyplot: it would choose a window system, and hold every figure for ever
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def loss(records: list[dict[str, Any]], dense: dict[str, Any] | None = None, unit: str = "nats") -> Figure | None:
    """Training loss, held-out loss and the n-gram lines over the tokens read; the dense model where K3 was after equal time."""
    train = [(r["tokens"], r["loss"]) for r in records if r["loss"] is not None]
    if not train:
        return None
    heldout = [(r["tokens"], r["heldout_loss"]) for r in records if r.get("heldout_loss") is not None]
    figure = blank(8, 5)
    axes = figure.add_subplot()
    axes.plot(*zip(*train), color="tab:blue", alpha=0.5, linewidth=0.8, label="train")
    if heldout:
        axes.plot(*zip(*heldout), color="tab:red", marker="o", markersize=4, label=f"held-out ({heldout[-1][1]:.3f})")
    last = next((r for r in reversed(records) if "bigram_loss" in r), None)
    if dense is not None:
        label = f"dense after equal time ({dense['heldout_loss']:.3f})"
        axes.plot(dense["k3_tokens"], dense["heldout_loss"], color="black", marker="x", linestyle="", label=label)
    lines = {"unigram": (last or {}).get("unigram_loss"), "bigram": (last or {}).get("bigram_loss")}
    for (name, value), style in zip(lines.items(), (":", "--")):
        if value is not None:
            axes.axhline(value, color="gray", linestyle=style, label=f"{name} ({value:.3f})")
    axes.set(xlabel="tokens", ylabel=f"loss per token ({unit})")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def experts(records: list[dict[str, Any]]) -> Figure | None:
    """For each MoE layer, the load of every expert over time as a multiple of the mean (1 is even; red is overloaded)."""
    loads = [(r["step"], r["load/experts"]) for r in records if r.get("load/experts")]
    if not loads:
        return None
    layers = list(loads[0][1])
    columns = min(3, len(layers))
    rows = -(-len(layers) // columns)
    figure = blank(4.2 * columns, 2.2 * rows)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, name in zip(grid.flat, layers):
        share = [[x * len(layer) / max(1, sum(layer)) for x in layer] for _, of in loads if (layer := of[name])]
        extent = (loads[0][0] - 0.5, loads[-1][0] + 0.5, -0.5, len(share[0]) - 0.5)
        image = axes.imshow(
            list(zip(*share)),
            aspect="auto",
            origin="lower",
            extent=extent,
            cmap="RdBu_r",
            vmin=0,
            vmax=2,
            interpolation="nearest",
        )
        axes.set(title=name, xlabel="step", ylabel="expert")
    for axes in grid.flat[len(layers) :]:
        axes.set_visible(False)
    figure.colorbar(image, ax=grid, label="load / mean load", extend="max")
    return figure


def residuals(weights: dict[str, list[float]]) -> Figure | None:
    """The mean weight that each reader gives to the embedding, each finished block and the running sum."""
    if not weights:
        return None
    widest = max(map(len, weights.values()))
    # the running sum is every reader's last source: it gets the last column, whatever the number of blocks before it
    table = [[*row[:-1], *[float("nan")] * (widest - len(row)), row[-1]] for row in weights.values()]
    names = ["embedding", *(f"block {i}" for i in range(1, widest - 1)), "running sum"][-widest:]
    figure = blank(2.5 + 1.0 * widest, 1.5 + 0.24 * len(table))
    axes = figure.add_subplot()
    image = axes.imshow(table, aspect="auto", cmap="viridis", vmin=0, vmax=1)
    axes.set_xticks(range(widest), names, rotation=30, ha="right")
    axes.set_yticks(range(len(table)), list(weights), fontsize=7)
    for y, row in enumerate(table):
        for x, value in enumerate(row):
            if value == value:
                axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=6, color="white" if value < 0.6 else "black")
    figure.colorbar(image, label="mean reading weight")
    return figure
