"""One pool of processes for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.parity.harness import Harness, open_harness


@pytest.fixture(scope="session")
def harness() -> Iterator[Harness]:
    """Runs cases; its processes are started when first needed and end with the session."""
    with open_harness() as opened:
        yield opened
