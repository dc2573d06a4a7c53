"""`k3 bench pipeline`: what is counted on the wire is what the plan says, hop by hop."""

from __future__ import annotations

from parallel.local import Helper
from recipes.bench import pipeline as bench


def test_what_travels_is_what_the_formulas_say(helper: Helper) -> None:
    lines = list(bench.table(helper))
    hops = [line.split() for line in lines if "->" in line]
    assert len(hops) == 7
    row = 64 * 2 * 64 * 4
    for stage, (_, _, _, new, computed, forward, backward, resent) in enumerate(hops):
        sizes = [int(text.replace(",", "")) for text in (computed, forward, backward)]
        rows = min(stage + 1, 3)  # of eight stages with a block each: what the next rank's previous stage had not seen
        assert int(new) == rows and sizes == [(rows + 1) * row + 24] * 3
        assert int(resent.replace(",", "")) == (stage + 2) * row + 24
    total = 2 * 8 * sum((min(g + 1, 3) + 1) * row + 24 for g in range(7))
    assert f"{total:,}" in lines[-4] and lines[-3].startswith("measured / computed 1.000000, measured / resending the bank 0.714")
    assert "and for none after the step" in lines[-1]
