"""`k3 bench balance`: domain-skewed ranks are balanced by pooled quantiles, with one bias, as one process would."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3.config import Balance
from parallel.local import Helper
from recipes.bench import balance as bench
from recipes.bench.balance import Measured
from recipes.cli import main
from recipes.proof.balance_steps import EXPERTS, MICRO_BATCHES, TOKENS, TOP_K, Curve, uneven

UPDATES = 5


@pytest.fixture(scope="module")
def measured(helper: Helper) -> Measured:
    return bench.measure(helper, (Balance.quantile, Balance.bias, Balance.none), UPDATES + 1)


def test_four_skewed_ranks_are_balanced_after_five_updates(measured: Measured) -> None:
    curves = {rule: curve.max_over_mean() for rule, curve in measured.ranks[0].items()}
    assert curves["quantile"][UPDATES] <= 1.2
    assert min(curves["none"]) > 1.5  # there is something to balance
    assert curves["bias"][UPDATES] > 1.5  # in which the bias step gets nowhere within five updates


def test_ranks_see_unlike_tokens_and_hold_one_bias(measured: Measured) -> None:
    own = [rank["quantile"].before_pooling for rank in measured.ranks]
    favourites = {load.index(max(load)) for load in own}
    assert len(favourites) > 1 and min(map(uneven, own)) > 1.5
    for rule in ("quantile", "bias", "none"):
        assert measured.same_bias(rule)
    assert any(measured.ranks[0]["quantile"].biases[-1])


def test_counts_are_those_of_one_process_with_the_whole_batch(measured: Measured) -> None:
    for rule in ("quantile", "bias", "none"):
        assert measured.same_as_alone(rule)
        assert measured.ranks[0][rule].biases == measured.alone[rule].biases
    every = bench.RANKS * MICRO_BATCHES * TOKENS * TOP_K
    assert all(sum(load) == every for load in measured.ranks[3]["quantile"].loads)
    pooled = [sum(loads) for loads in zip(*(rank["quantile"].before_pooling for rank in measured.ranks))]
    assert pooled == measured.alone["quantile"].loads[0] and len(pooled) == EXPERTS


def test_what_differs_is_said() -> None:
    one, other = Curve([[3, 1]], [[0.5, -0.5]], [3, 1]), Curve([[2, 2]], [[0.5, -0.25]], [2, 2])
    apart = Measured([{"quantile": one}, {"quantile": other}], {"quantile": one})
    assert not apart.same_bias("quantile") and not apart.same_as_alone("quantile")
    assert uneven([3, 1]) == 1.5


def test_table_and_picture_show_every_rule(
    measured: Measured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "SHOWN", (0, UPDATES))
    monkeypatch.setattr(bench, "measure", lambda helper: measured)
    path = tmp_path / "new" / "balance.png"
    assert main(["bench", "balance", f"picture={path}"]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    after = next(line for line in lines if line.strip().startswith(f"{UPDATES} updates"))
    assert float(after.split()[2]) <= 1.2 and len(after.split()) == 5
    assert lines[-3].split() == ["ranks", "have", "one", "bias", "yes", "yes", "yes"]
    assert lines[-1] == f"picture: {path}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench", "kda", "picture=a.png"], "picture=a.png: only the balance benchmark has it"),
        (["bench", "balance", "pictur=a.png"], "pictur: no such key of a benchmark; the nearest is picture"),
        (["bench", "balance", "picture="], "picture= is empty"),
        (["bench", "balance", "seed=1"], "seed=1: only the faults benchmark has it"),
        (["bench", "faults", "precison=fp32"], "precison: no such key of a benchmark; the nearest is precision"),
        (["bench", "faults", "n=0"], "n=0: must be a whole number from 1 on"),
        (["bench", "faults", "seed=x"], "seed=x: must be a whole number from 0 on"),
        (["bench", "faults", "precision=fp64"], "precision=fp64: no such precision"),
    ],
)
def test_a_key_that_no_chosen_benchmark_has_or_takes_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err
