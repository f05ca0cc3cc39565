"""Blends: shares of samples, exact to one at every prefix, each source's own samples in its own order."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.batches import Source, TrainingData
from data.blend import Blend
from data.errors import DataError

MANY = (np.random.default_rng(0).random(300) + 0.001).tolist()
RANDOM = np.random.default_rng(1)


@pytest.mark.parametrize(
    "weights",
    [[0.7, 0.3], [1, 1, 1], [3, 5, 7, 11], [1e-4] * 50 + [1.0], MANY, [0.1] * 10, [1e-9, 1.0], [2**40, 2**40 + 1, 3]],
    ids=["two", "equal", "whole", "one large", "hundreds", "tenths", "one tiny", "huge numbers"],
)
def test_exact_to_one_sample_at_every_prefix(weights: list[float]) -> None:
    count = 70_000  # more than a block
    sources, inner = Blend(weights).locate(np.arange(count))
    share = np.array(weights) / sum(weights)
    for source in range(len(weights)):
        given = np.cumsum(sources == source)
        assert np.abs(given - share[source] * np.arange(1, count + 1)).max() < 1 + 1e-6
        assert np.array_equal(inner[sources == source], np.arange(given[-1])), "its samples in order, none left out"


def test_any_number_is_found_by_itself() -> None:
    numbers = RANDOM.integers(0, 300_000, 400)
    straight = Blend(MANY).locate(np.arange(300_000))
    blend = Blend(MANY)
    for asked in (numbers, numbers[::-1]):
        sources, inner = blend.locate(asked)
        assert np.array_equal(sources, straight[0][asked])
        assert np.array_equal(inner, straight[1][asked])


def test_numbers_beyond_32_bits() -> None:
    sources, inner = Blend([0.75, 0.25]).locate(np.array([2**34, 2**34 + 1, 2**34 + 2, 2**34 + 3]))
    assert sorted(sources.tolist()) == [0, 0, 0, 1]
    assert inner[sources == 1].tolist() == [2**32]


def test_scale_of_weights_does_not_matter() -> None:
    first = Blend([0.2, 0.5, 0.3]).locate(np.arange(1000))[0]
    assert np.array_equal(first, Blend([2, 5, 3]).locate(np.arange(1000))[0])


@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), float("inf"), "much"])
def test_weights_must_be_above_zero(weight: float) -> None:
    with pytest.raises(DataError, match="weights above 0"):
        Blend([1.0, weight])


def test_small_sources_repeat_by_whole_epochs(numbered_set: Callable[..., Path]) -> None:
    large, small = numbered_set("large", [4001]), numbered_set("small", [10, 20, 11])  # 500 and 5 samples of 8
    data = TrainingData([Source(str(large), 0.9), Source(str(small), 0.1)], 8, seed=0)
    sources, _ = data.blend.locate(np.arange(200))
    rows = data.micro_batch(np.arange(200)).tokens.numpy()
    of_small = rows[sources == 1]
    assert len(of_small) == 20
    for epoch in range(4):
        targets = of_small[5 * epoch : 5 * epoch + 5]
        assert len(np.unique(targets)) == 40, "each of its 5 samples once before any comes again"
    assert len(np.unique(rows[sources == 0])) == 180 * 8


def test_hundreds_of_sources(numbered_set: Callable[..., Path]) -> None:
    sources = [
        {"path": str(numbered_set(f"set{number}", [100 + number])), "weight": MANY[number]} for number in range(200)
    ]
    data = TrainingData(sources, 16, seed=0)
    assert data.micro_batch(np.arange(64)).tokens.shape == (64, 16)


def test_entries_must_be_path_and_weight() -> None:
    for entry in ({"paht": "x"}, {"path": "x", "wieght": 2}):
        with pytest.raises(DataError, match="path and weight"):
            TrainingData([entry], 8, seed=0)
    with pytest.raises(DataError, match="at least one data set"):
        TrainingData([], 8, seed=0)
