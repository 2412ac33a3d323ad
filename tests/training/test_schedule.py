"""Schedules: shape of each curve, ends included."""

import math

import pytest

from training.schedule import OptimConfig, fitted, learning_rate


def rates(num_steps: int, **optim: object) -> list[float]:
    config = OptimConfig(lr=2.0, **optim)
    return [learning_rate(step, config, num_steps) for step in range(num_steps)]


def test_constant_with_warmup() -> None:
    assert rates(6, schedule="constant", warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_constant_without_warmup() -> None:
    assert rates(3) == [2.0, 2.0, 2.0]


def test_wsd_is_stable_then_falls_linearly() -> None:
    assert rates(8, schedule="wsd", warmup_steps=2, decay_steps=4) == [1.0, 2.0, 2.0, 2.0, 2.0, 1.5, 1.0, 0.5]


def test_wsd_ends_at_the_minimum() -> None:
    curve = rates(1000, schedule="wsd", decay_steps=500, min_lr_ratio=0.1)
    assert curve[500] == 2.0
    assert curve[-1] == pytest.approx(0.2, abs=0.005)


def test_cosine_starts_at_peak_after_warmup_and_ends_at_minimum() -> None:
    curve = rates(1002, schedule="cosine", warmup_steps=2, min_lr_ratio=0.25)
    assert curve[:3] == [1.0, 2.0, 2.0]
    assert curve[502] == pytest.approx(2.0 * (0.25 + 0.75 / 2))
    assert curve[-1] == pytest.approx(0.5, abs=1e-4)
    assert all(a >= b for a, b in zip(curve[2:], curve[3:], strict=False))


def test_rate_past_the_end_stays_at_the_minimum() -> None:
    """A run that is extended by a smaller train.steps must not get a negative or rising rate."""
    for schedule in ("wsd", "cosine"):
        config = OptimConfig(lr=2.0, schedule=schedule, decay_steps=4, min_lr_ratio=0.5)
        assert math.isclose(learning_rate(50, config, 10), 1.0)


def test_short_run_shrinks_warmup_and_decay_in_proportion() -> None:
    """A preset with 200 + 400 steps of them must run with train.steps=100."""
    config = OptimConfig(lr=2.0, schedule="wsd", warmup_steps=200, decay_steps=400)
    assert fitted(config, 100) == (33, 67) and fitted(config, 600) == (200, 400) and fitted(config, 1) == (0, 1)
    curve = [learning_rate(step, config, 100) for step in range(100)]
    assert max(curve) == curve[32] == 2.0 and curve[0] > 0 and 0 < curve[-1] < 0.05
    assert fitted(OptimConfig(warmup_steps=2000), 100) == (100, 0)
