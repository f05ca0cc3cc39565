"""The pipeline cut: how many blocks each stage holds, so that the slowest stage is as fast as can be."""

from collections.abc import Sequence


class PartitionError(Exception):
    """The blocks cannot be cut as asked: one sentence."""


def partition_blocks(
    num_blocks: int, num_stages: int, block_cost: float = 1.0, first_cost: float = 0.0, last_cost: float = 0.0
) -> list[int]:
    """Return the number of blocks of each stage, at least one each, so that the largest cost of a stage is least.

    The first stage also bears `first_cost` (the embedding), the last one `last_cost` (final norm, head and loss), in
    the unit of `block_cost`. Among equal maxima the counts are as even as can be; the remainder goes to the earlier of
    the stages that are not the ends, since they bear blocks only.

    Raises `PartitionError` where there are more stages than blocks.
    """
    if num_stages > num_blocks:
        raise PartitionError(
            f"{num_blocks} blocks cannot be cut into {num_stages} stages: each needs at least one block"
        )
    extra = [0.0] * num_stages
    extra[0] += first_cost
    extra[-1] += last_cost
    counts = [1] * num_stages
    # Giving each further block to the stage that is cheapest after taking it minimizes the maximum, as all blocks cost
    # the same (an exchange argument); among equals the one with fewest blocks, then an inner one, keeps the cut even.
    for _ in range(num_blocks - num_stages):
        counts[
            min(
                range(num_stages),
                key=lambda s: ((counts[s] + 1) * block_cost + extra[s], counts[s], s in (0, num_stages - 1), s),
            )
        ] += 1
    return counts


def stage_bounds(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Turn block counts into (first block, one past the last block) of each stage."""
    bounds, start = [], 0
    for count in counts:
        bounds.append((start, start + count))
        start += count
    return bounds
