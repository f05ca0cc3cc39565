"""The pipeline cut: every block on one stage, none empty, the slowest stage as fast as can be."""

from itertools import combinations

import pytest

from parallel.partition import PartitionError, partition_blocks, stage_bounds
from parallel.pipeline_engine import layer_bounds


@pytest.mark.parametrize(("blocks", "stages"), [(42, 16), (38, 8), (30, 4), (32, 8), (7, 3), (8, 1), (4, 4)])
def test_equal_costs_are_divided_evenly(blocks: int, stages: int) -> None:
    """Cases met elsewhere: the last stages empty (42/16), the remainder on the last (38/8), layers lost (30/4)."""
    counts = partition_blocks(blocks, stages)
    assert len(counts) == stages and sum(counts) == blocks
    assert min(counts) >= 1 and max(counts) - min(counts) <= 1


def test_more_stages_than_blocks_is_refused() -> None:
    with pytest.raises(PartitionError, match="3 blocks cannot be cut into 4 stages"):
        partition_blocks(3, 4)


@pytest.mark.parametrize("ends", [(0.0, 0.0), (0.0, 0.9), (0.5, 2.5), (3.0, 3.0), (0.0, 20.0)])
@pytest.mark.parametrize(("blocks", "stages"), [(7, 3), (8, 2), (9, 4)])
def test_no_cut_has_a_faster_slowest_stage(blocks: int, stages: int, ends: tuple[float, float]) -> None:
    """Against every possible cut."""

    def slowest(counts: list[int]) -> float:
        costs = [float(count) for count in counts]
        costs[0] += ends[0]
        costs[-1] += ends[1]
        return max(costs)

    cuts = [
        [b - a for a, b in zip((0, *places), (*places, blocks), strict=True)]
        for places in combinations(range(1, blocks), stages - 1)
    ]
    assert slowest(partition_blocks(blocks, stages, 1.0, *ends)) == min(map(slowest, cuts))


def test_layers_of_the_stages_are_all_layers_once() -> None:
    """Embedding, 7 blocks, final norm and head are layers 0 to 9."""
    assert stage_bounds([3, 2, 2]) == [(0, 3), (3, 5), (5, 7)]
    assert layer_bounds([3, 2, 2]) == [0, 4, 6, 10]
    assert layer_bounds([7]) == [0, 10]
