"""Which source each sample comes from, when several are mixed by weight.

After any n samples, source i has given floor(n w_i) or ceil(n w_i) of them, w_i being its share: exact to one sample at
every prefix. (The common rule "take the source that is furthest behind" does not hold this for many sources.) It is
the just-in-time scheduling problem: the j-th sample of source i may stand at places floor((j-1)/w_i) + 1 to
ceil(j/w_i), and taking at each place the one whose last place comes first always succeeds (Steiner and Yeomans 1993).
Computed in whole numbers, so nothing drifts; the schedule depends on the weights alone.

The schedule is made in blocks, in order, about 1.5 microseconds a sample, and repeats where the weights allow it (0.7
and 0.3: every 10 samples), so only weights with a long period and a late start have to wait for it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from data.errors import DataError

BLOCK = 1 << 16
KEPT_BLOCKS = 8


class Blend:
    """`locate(numbers)` says, for each sample number of the blend, its source and its number within that source."""

    def __init__(self, weights: Sequence[float]) -> None:
        """`weights` are shares in any unit, each above 0. Raises DataError where they are not."""
        for weight in weights:
            if not (isinstance(weight, int | float) and math.isfinite(weight) and weight > 0):
                raise DataError(f"data.train: expected weights above 0, found {weight}")
        fractions = [
            Fraction(str(weight)) for weight in weights
        ]  # 0.1 as it was written, not its nearest binary number
        common = math.lcm(*(fraction.denominator for fraction in fractions))
        shares = [int(fraction * common) for fraction in fractions]
        divisor = math.gcd(*shares)
        self._shares = [share // divisor for share in shares]
        self._period = sum(self._shares)  # after so many samples every source has had exactly its share
        self._blocks: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._counts = [np.zeros(len(weights), dtype=np.int64)]  # samples given before each block of one period

    @property
    def shares(self) -> list[float]:
        """The weights, scaled to a sum of 1."""
        return [share / self._period for share in self._shares]

    def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(int64 sources, int64 numbers within the source) of the blend's samples `numbers`."""
        numbers = np.asarray(numbers, dtype=np.int64)
        if len(self._shares) == 1:
            return np.zeros_like(numbers), numbers
        sources, inner = np.empty_like(numbers), np.empty_like(numbers)
        for index, number in enumerate(numbers.tolist()):
            period, place = divmod(number, self._period)
            block, offset = divmod(place, BLOCK)
            block_sources, block_inner = self._block(block)
            source = int(block_sources[offset])
            sources[index] = source
            inner[index] = int(block_inner[offset]) + period * self._shares[source]
        return sources, inner

    def _block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        if block not in self._blocks:
            while len(self._counts) <= block:
                self._count(self._schedule((len(self._counts) - 1) * BLOCK, self._counts[-1]))
            counts = self._counts[block]
            sources = self._schedule(block * BLOCK, counts)
            if len(self._counts) == block + 1:
                self._count(sources)
            inner = np.empty(len(sources), dtype=np.int64)
            order = np.argsort(sources, kind="stable")
            given = np.bincount(sources, minlength=len(counts))
            within = np.arange(len(sources)) - np.repeat(np.cumsum(given) - given, given)
            inner[order] = within + np.repeat(counts, given)
            if len(self._blocks) >= KEPT_BLOCKS:
                self._blocks.pop(next(iter(self._blocks)))
            self._blocks[block] = (sources, inner)
        return self._blocks[block]

    def _count(self, sources: np.ndarray) -> None:
        self._counts.append(self._counts[-1] + np.bincount(sources, minlength=len(self._shares)))

    def _schedule(self, start: int, counts: np.ndarray) -> np.ndarray:
        """Sources of the samples from `start` to the block's or the period's end, where `counts` were given before."""
        period, shares = self._period, self._shares
        stop = min(start + BLOCK, period)
        due: list[tuple[int, int, int]] = []  # (last place, source, how many-th) of samples that may stand now
        waiting: list[list[tuple[int, int, int]]] = [
            [] for _ in range(stop - start)
        ]  # by the place they may stand from

        def add(source: int, which: int, place: int) -> None:
            first = (which - 1) * period // shares[source]  # places from 0 here
            entry = (-(-which * period // shares[source]), source, which)
            if first <= place:
                heapq.heappush(due, entry)
            elif first < stop:
                waiting[first - start].append(entry)

        for source, count in enumerate(counts.tolist()):
            add(source, count + 1, start)
        result = np.empty(stop - start, dtype=np.int64)
        for place in range(start, stop):
            for entry in waiting[place - start]:
                heapq.heappush(due, entry)
            _, source, which = heapq.heappop(due)
            result[place - start] = source
            add(source, which + 1, place)
        return result
