"""Learning-rate schedules: their shapes and their limits."""

import pytest

from optim.config import ScheduleConfig, ScheduleName
from optim.schedule import factor, validate


@pytest.mark.parametrize("name", list(ScheduleName))
def test_warm_up_is_linear_and_ends_at_one(name: ScheduleName) -> None:
    cfg = ScheduleConfig(name=name, warmup=0.05)
    got = [factor(cfg, t, 200) for t in range(10)]
    assert got == pytest.approx([(t + 1) / 10 for t in range(10)])


def test_cosine() -> None:
    cfg = ScheduleConfig(warmup=0.01, min_lr=0.1)
    got = [factor(cfg, t, 1000) for t in range(1000)]
    assert got[9] == 1.0
    assert got[10 + 990 // 2 - 1] == pytest.approx(0.55, abs=1e-9)  # half way
    assert got[-1] == pytest.approx(0.1)
    assert got[9:] == sorted(got[9:], reverse=True) and len(set(got[9:])) == 991
    assert factor(cfg, 5000, 1000) == pytest.approx(0.1)


def test_wsd_is_flat_then_linear() -> None:
    cfg = ScheduleConfig(name=ScheduleName.wsd, warmup=0.1, min_lr=0.2, decay=0.25)
    got = [factor(cfg, t, 100) for t in range(100)]
    assert got[9:75] == [1.0] * 66
    assert got[75:] == pytest.approx([1 - 0.8 * (i + 1) / 25 for i in range(25)])


def test_constant() -> None:
    cfg = ScheduleConfig(name=ScheduleName.constant)
    assert [factor(cfg, t, 50) for t in (0, 1, 49, 99)] == [1.0] * 4


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("name", list(ScheduleName))
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_tiny_runs_stay_in_range(name: ScheduleName, steps: int, share: float) -> None:
    cfg = ScheduleConfig(name=name, warmup=share, decay=1.0 - share)
    if name is ScheduleName.wsd and share == 1.0:
        with pytest.raises(ValueError, match=r"optim\.schedule\.decay=0\.0: wsd decays"):
            validate(cfg, steps)
        return
    validate(cfg, steps)
    assert all(0 < factor(cfg, t, steps) <= 1 for t in range(steps + 2))


def test_errors_name_the_field() -> None:
    with pytest.raises(ValueError, match=r"run.steps=0"):
        validate(ScheduleConfig(), 0)
    with pytest.raises(ValueError, match=r"optim.schedule.warmup=-0.1"):
        validate(ScheduleConfig(warmup=-0.1), 10)
    with pytest.raises(ValueError, match=r"optim.schedule.min_lr=2.0"):
        validate(ScheduleConfig(min_lr=2.0), 10)
    with pytest.raises(ValueError, match="overlap"):
        validate(ScheduleConfig(name=ScheduleName.wsd, warmup=0.6, decay=0.6), 10)
