"""`k3 bench balance`: three rules of balancing on four ranks, each of which sees one domain's tokens only.

Router, counts, pooling and update are the model's own; the router's weights stay as they are, so that all that moves the load is
the selection bias. Beside Quantile Balancing: the bias step (model.moe.balance=bias) and none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from k3.config import Balance
from parallel.local import Helper
from recipes.console import say
from recipes.proof.balance_steps import EXPERTS, MICRO_BATCHES, TOKENS, TOP_K, Curve, sizes, uneven

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RANKS = 4  # and as many domains
STEPS = 31
RULES = (Balance.quantile, Balance.bias, Balance.none)
SHOWN = (0, 1, 2, 5, 10, 20, 30)  # updates before the step whose load is printed
PICTURE = Path("runs/bench/balance.png")


@dataclass(frozen=True)
class Measured:
    """ranks: the curves of each rank by rule; alone: those of one process with all tokens."""

    ranks: list[dict[str, Curve]]
    alone: dict[str, Curve]

    def same_bias(self, rule: str) -> bool:
        """Whether every rank has the same bias after every step, to the last bit."""
        return all(rank[rule].biases == self.ranks[0][rule].biases for rank in self.ranks)

    def same_as_alone(self, rule: str) -> bool:
        """Whether the ranks' counts are those of one process, in every step and on every expert."""
        return all(rank[rule].loads == self.alone[rule].loads for rank in self.ranks)


def run(picture: str | None = None) -> None:
    """Prints the table and draws the curves into the file `picture`, else into runs/bench/balance.png."""
    with Helper() as helper:
        measured = measure(helper)
    for line in table(measured):
        say(line)
    path = Path(picture) if picture else PICTURE
    path.parent.mkdir(parents=True, exist_ok=True)
    draw({rule: curve.max_over_mean() for rule, curve in measured.ranks[0].items()}).savefig(path, dpi=120)
    say(f"picture: {path}")


def measure(helper: Helper, rules: Sequence[Balance] = RULES, steps: int = STEPS) -> Measured:
    """The curves on RANKS ranks of a domain each, and on one rank with all of them."""
    target = "recipes.proof.balance_steps:on_rank"
    (alone,) = helper.run_ranks(target, 1, list(rules), RANKS, steps)
    return Measured(helper.run_ranks(target, RANKS, list(rules), RANKS, steps), alone)


def table(measured: Measured) -> Iterator[str]:
    first = measured.ranks[0]
    dials = sizes(Balance.quantile).moe
    yield (
        f"{RANKS} ranks, each with tokens of a domain of its own: {MICRO_BATCHES} micro-batches of {TOKENS} a step, "
        f"{EXPERTS} experts, top-{TOP_K}; {dials.bins} bins, bias_step {dials.bias_step:g}"
    )
    own = ", ".join(f"{uneven(rank['quantile'].before_pooling):.2f}" for rank in measured.ranks)
    yield f"max/mean load among each rank's own tokens, before any update: {own}"
    yield f"{'max/mean load after':<22}" + "".join(f"{rule:>12}" for rule in first)
    curves = {rule: curve.max_over_mean() for rule, curve in first.items()}
    for updates in SHOWN:
        yield f"{updates:>4} updates{'':<10}" + "".join(f"{curve[updates]:>12.3f}" for curve in curves.values())
    yield f"{'ranks have one bias':<22}" + "".join(f"{_yes(measured.same_bias(rule)):>12}" for rule in first)
    yield f"{'loads as one process':<22}" + "".join(f"{_yes(measured.same_as_alone(rule)):>12}" for rule in first)


def draw(curves: Mapping[str, Sequence[float]]) -> Figure:
    """max/mean load of every rule over the updates made."""
    from recipes.callbacks.pictures import blank

    figure = blank(7, 4)
    axes = figure.add_subplot()
    for rule, curve in curves.items():
        axes.plot(range(len(curve)), curve, label=f"model.moe.balance={rule}", marker="o", markersize=3)
    axes.axhline(1.0, color="gray", linewidth=0.8)
    axes.axhline(1.2, color="gray", linestyle=":", label="1.2")
    axes.set(xlabel="updates", ylabel="max / mean load", title=f"{RANKS} ranks, a domain each")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _yes(held: bool) -> str:
    return "yes" if held else "NO"


if __name__ == "__main__":
    run()
