"""Faults that people met in trainers like this one, to be planted in the processes of a pool.

A comparison that does not fail with the fault in proves nothing. Each function patches the product while it is open.
"""

import contextlib
from collections.abc import Callable, Iterator

FAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {}


@contextlib.contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Plant the fault of this name while open; None plants nothing."""
    if name is None:
        yield
        return
    with FAULTS[name]():
        yield
