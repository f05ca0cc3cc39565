"""The scenarios of the selected tests run side by side: most of them mostly wait. Each test then looks at one."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.slurm import scenarios, ways_in
from tests.slurm.lab import missing
from tests.slurm.scenarios import Outcome

AT_ONCE = 3
"""Clusters side by side on two cores."""
ALL = {**scenarios.SCENARIOS, **ways_in.SCENARIOS}


@pytest.fixture(scope="session")
def scenario(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Outcome]]:
    """The outcome of a scenario by its name; tests mark which ones they ask for."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    wanted = {name for item in request.session.items for mark in item.iter_markers("scenario") for name in mark.args}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures: dict[str, Future] = {name: pool.submit(ALL[name]) for name in ALL if name in wanted}
        yield lambda name: futures[name].result()
        for future in futures.values():
            future.cancel()
