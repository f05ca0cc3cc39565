"""One pool of processes for all tests of this folder that need several; real launchers are slow to start."""

from collections.abc import Iterator

import pytest

from tests.parity.pool import Pool, open_pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Its processes are started when first needed and end with the session."""
    with open_pool() as opened:
        yield opened
