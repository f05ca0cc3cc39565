"""One pool of processes for all tests of this folder."""

import time
from collections.abc import Iterator

import pytest

from tests.parity.harness import Harness, open_harness

_costs: list[str] = []


@pytest.fixture(scope="session")
def harness() -> Iterator[Harness]:
    """Runs cases; its processes are started when first needed and end with the session."""
    began = time.process_time()
    with open_harness() as opened:
        yield opened
        here, there = time.process_time() - began, opened.pool.cpu_seconds
    _costs.append(f"{there:.0f} s of CPU in the processes of the pool, {here:.0f} s here, most of it the oracle")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what the cases cost, whatever else the machine was doing."""
    for line in _costs:
        terminalreporter.write_line(f"parity: {line}")
