"""A file that grows by whole records, on a file system that may be full for a while."""

import os
import threading
from collections.abc import Callable
from pathlib import Path


class Appender:
    """Appends records, each at once. What the file system does not take waits in memory and goes out first, later.

    So a full disk costs a run nothing but a warning, and no record stands in the file in part or twice.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self.path = path
        self._warn = warn
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._end = os.fstat(self._file).st_size
        self._waiting: list[bytes] = []
        self._lock = threading.Lock()  # a save's thread syncs while training goes on

    def append(self, record: bytes) -> None:
        """Write a record, after those that wait."""
        with self._lock:
            was_behind = bool(self._waiting)
            self._waiting.append(record)
            error = self._try_to_write()
        if error is not None and not was_behind:
            self._warn(f"warning: {self.path} cannot be written: {error.strerror or error}; kept until it can")
        if error is None and was_behind:
            self._warn(f"{self.path} can be written again, and nothing of it is lost")

    def _try_to_write(self) -> OSError | None:
        try:
            self._write_waiting()
        except OSError as error:
            os.ftruncate(self._file, self._end)  # a record that fits in part is none
            return error
        return None

    def _write_waiting(self) -> None:
        while self._waiting:
            record = self._waiting[0]
            if os.write(self._file, record) != len(record):
                raise OSError(28, "No space left on device")
            self._end += len(record)
            del self._waiting[0]

    def sync(self) -> None:
        """Make all records survive a power cut; OSError where that is not possible."""
        with self._lock:
            if (error := self._try_to_write()) is not None:
                raise error
            os.fsync(self._file)

    def close(self) -> None:
        """End the file, with a last try at what waits."""
        with self._lock:
            error = self._try_to_write()
            os.close(self._file)
        if error is not None:
            self._warn(f"warning: {len(self._waiting)} records of {self.path} are lost: {error.strerror or error}")
