"""The one exception that this package raises for what a user can mend."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


class DataError(Exception):
    """One sentence that names the file (or option), what was expected and what was found."""


@contextlib.contextmanager
def reading(place: str | os.PathLike[str]) -> Iterator[None]:
    """Makes a DataError of what the operating system refuses in here; it names the file, or else `place`."""
    with _naming(place, "a file that can be read"):
        yield


@contextlib.contextmanager
def writing(place: str | os.PathLike[str]) -> Iterator[None]:
    """As `reading`, for a place that is written to."""
    with _naming(place, "a place that can be written to"):
        yield


@contextlib.contextmanager
def _naming(place: str | os.PathLike[str], expected: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # Of two names the second is the target. A full disk comes without any: writing to an open file knows of none.
        path = error.filename2 or error.filename or os.fspath(place)
        raise DataError(f"{path}: expected {expected}, found: {(error.strerror or str(error)).lower()}") from error
