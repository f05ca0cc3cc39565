"""What any layout saves, any other loads: weights and moments bit for bit, the next losses as if uninterrupted."""

from functools import cache

import pytest

from tests.parity.cases import Case
from tests.parity.elastic import PAIRS, Elastic
from tests.parity.harness import Harness

elastic = cache(Elastic)


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda case: case.name)
def test_another_layout_goes_on(harness: Harness, source: Case, target: Case) -> None:
    resumed = elastic(harness).resume(source, target)
    assert resumed.unequal == []
    assert resumed.over(harness.bounds(target)) == {}
