"""A checkpoint of any layout, loaded under any other, is the same model and optimizer state bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from parallel.config import ParallelConfig
from parallel.local import Helper

LAYOUTS = {
    "single": ParallelConfig(),
    "TP2": ParallelConfig(tp=2),
    "PP2 VPP2": ParallelConfig(pp=2, vpp=2),
    "EP4": ParallelConfig(dp=4, ep=4),
    "CP2": ParallelConfig(cp=2),
    "DP2": ParallelConfig(dp=2, bucket=5000),
    "DP3": ParallelConfig(dp=3, bucket=5000),
    "DP2 without ZeRO": ParallelConfig(dp=2, zero=0),
    "PP2 VPP2 DP2 ZeRO-2": ParallelConfig(pp=2, vpp=2, dp=2, zero=2),
    "TP2 EP2 DP2": ParallelConfig(tp=2, dp=2, ep=2),
    "TP2 EP4 CP2": ParallelConfig(tp=2, cp=2, dp=1, ep=4),
    "PP2 TP2": ParallelConfig(pp=2, tp=2),
}
QUICK = ("TP2", "DP2", "PP2 VPP2")


def size(layout: ParallelConfig) -> int:
    return layout.tp * layout.pp * layout.cp * (layout.dp or 1)


def run(helper: Helper, ranks: int, folder: Path, *how: Any) -> list[str]:
    """What differs, on any rank. See reshard_ranks.run."""
    layouts, written, *broken = (*how, None)[: max(2, len(how))]
    found = helper.run_ranks("tests.equivalence.reshard_ranks:run", ranks, str(folder), layouts, written, *broken, timeout=900)
    return [line for lines in found for line in lines]


def test_three_layouts_read_each_other(helper: Helper, tmp_path: Path) -> None:
    layouts = {name: LAYOUTS[name] for name in QUICK}
    run(helper, 2, tmp_path, layouts)
    pairs = {reader: [writer] for reader, writer in zip(QUICK, (*QUICK[1:], QUICK[0]))}
    assert run(helper, 2, tmp_path, layouts, pairs) == []


@pytest.fixture(scope="module")
def written(helper: Helper, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of every layout."""
    folder = tmp_path_factory.mktemp("layouts")
    for n in sorted({size(layout) for layout in LAYOUTS.values()}):
        run(helper, n, folder, {name: layout for name, layout in LAYOUTS.items() if size(layout) == n})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("reader", LAYOUTS)
def test_every_layout_reads_all(helper: Helper, written: Path, reader: str) -> None:
    layout = LAYOUTS[reader]
    assert run(helper, size(layout), written, {reader: layout}, {reader: list(LAYOUTS)}) == []


@pytest.mark.slow
def test_a_part_read_from_the_wrong_place_is_noticed(helper: Helper, tmp_path: Path) -> None:
    layouts = {"DP2": LAYOUTS["DP2"]}
    run(helper, 2, tmp_path, layouts)
    wrong = run(helper, 2, tmp_path, layouts, {"DP2": ["DP2"]}, "early")
    assert any("momentum" in line for line in wrong) and any("exp_avg" in line for line in wrong)
