"""Processes for what needs more than one: started once, as for the parity tests."""

from collections.abc import Iterator

import pytest

from tests.parity.pool import Pool, open_pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Runs a function of `tests.parallel.probes` on every rank of a world."""
    with open_pool() as opened:
        yield opened
