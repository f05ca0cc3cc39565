"""The learning rate of each schedule, against values worked out by hand."""

import math

import pytest

from training.configuration import Optimizer
from training.learning_rate import learning_rate


def rates(steps: list[int], total: int, **keys: object) -> list[float]:
    optimizer = Optimizer.model_validate({"learning_rate": 1.0, **keys})
    return [learning_rate(optimizer, total, step) for step in steps]


def test_warm_up_rises_in_a_straight_line_to_the_peak() -> None:
    for schedule in ("constant", "cosine", "linear", "wsd"):
        found = rates([1, 2, 3, 4, 5], 100, schedule=schedule, warmup_steps=5)
        assert found == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_constant_stays() -> None:
    assert rates([1, 50, 100, 1000], 100, schedule="constant") == [1.0] * 4


def test_linear() -> None:
    # From 1 on step 0 to 0.1 on step 100: 0.9 / 100 a step.
    assert rates([1, 50, 99, 100, 150], 100, schedule="linear", min_ratio=0.1) == pytest.approx(
        [0.991, 0.55, 0.109, 0.1, 0.1]
    )


def test_linear_after_warm_up_ends_on_decay_steps_counted_from_0() -> None:
    # From 1 on step 20 to 0 on step 60: 1 / 40 a step.
    found = rates([20, 21, 40, 59, 60, 61], 100, schedule="linear", min_ratio=0, warmup_steps=20, decay_steps=60)
    assert found == pytest.approx([1, 39 / 40, 0.5, 1 / 40, 0, 0])


def test_cosine() -> None:
    # A quarter of the way cos(pi / 4) = 1 / sqrt 2; half way the mean of both ends.
    found = rates([10, 20, 30, 40, 50, 51], 50, schedule="cosine", min_ratio=0.2, warmup_steps=10)
    quarter = 0.8 * (1 + math.sqrt(0.5)) / 2
    assert found == pytest.approx([1, 0.2 + quarter, 0.6, 0.2 + 0.8 - quarter, 0.2, 0.2])


def test_wsd_decays_over_its_last_fifth() -> None:
    assert rates([5, 80, 81, 90, 100, 110], 100, schedule="wsd", min_ratio=0.1, warmup_steps=5) == pytest.approx(
        [1, 1, 1 - 0.9 / 20, 0.55, 0.1, 0.1]
    )


def test_wsd_decays_over_as_many_steps_as_it_is_told() -> None:
    found = rates([40, 50, 55, 60, 90], 100, schedule="wsd", min_ratio=0, decay_steps=60, wsd_decay_steps=10)
    assert found == pytest.approx([1, 1, 0.5, 0, 0])


def test_wsd_whose_warm_up_reaches_into_the_last_fifth_starts_its_decay_at_the_peak() -> None:
    assert rates([90, 91, 95, 100], 100, schedule="wsd", min_ratio=0, warmup_steps=90) == pytest.approx(
        [1, 0.9, 0.5, 0]
    )


def test_a_run_shorter_than_its_warm_up_only_warms_up() -> None:
    assert rates([1, 2, 3], 3, schedule="cosine", warmup_steps=6) == pytest.approx([1 / 6, 2 / 6, 3 / 6])


def test_the_peak_scales_everything() -> None:
    optimizer = Optimizer(learning_rate=3e-3, warmup_steps=10, min_ratio=0.05)
    assert learning_rate(optimizer, 180, 10) == pytest.approx(3e-3)
    assert learning_rate(optimizer, 180, 180) == pytest.approx(1.5e-4)


def test_steps_count_from_1() -> None:
    with pytest.raises(ValueError, match="step is 0, expected at least 1"):
        rates([0], 10)
