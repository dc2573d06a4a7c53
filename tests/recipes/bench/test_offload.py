"""`k3 bench offload`: what its sides come to."""

from __future__ import annotations

import pytest

from recipes.bench import offload


@pytest.mark.slow
def test_offloading_changes_where_the_state_lies_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    offload.run()
    lines = capsys.readouterr().out.splitlines()
    beside, offloaded = (
        next(line for line in lines if f"optim.offload={name} optim.adamw.kernel=torch" in line) for name in ("none", "cpu")
    )
    assert "weights differ by 0.0e+00" in beside and "weights differ by 0.0e+00" in offloaded
    assert beside.endswith("MB of masters and moments beside the weights") and offloaded.endswith("in CPU memory")
    # lines of the table are indented; what the rooms below log is not, and is shown where another test has asked for it
    theirs = [x for x in lines if x.startswith("  ") and "deepspeed" in x]
    assert len(theirs) == 1
    if "left out" not in theirs[0]:
        assert float(theirs[0].split("weights differ by ")[1].split()[0]) < 1e-6, theirs
    else:
        assert "the extra `deepspeed` is not installed" in theirs[0]
