"""Requests to stop a run: signals, the file STOP, the time limit, the end of the launcher; collected by a thread.

A rank that left alone would leave the others waiting for it, so a request is only noted here. All ranks compare notes
after each step (`Trainer`), and save and leave together. Until a rank has met the others there is nobody to agree
with, and nothing to save: then it leaves at once.
"""

import os
import select
import signal
import sys
import threading
import time
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import NoReturn

from training.processes import is_alive, launcher_is_missing, launchers_above

STOP_FILE = "STOP"
POLL_SECONDS = 1.0


class Reason(IntEnum):
    """Why a run was asked to stop; where ranks have several, the highest counts."""

    NONE = 0
    TIME = 1
    FILE = 2
    LAUNCHER = 3
    SIGINT = 4
    SIGUSR1 = 5
    SIGTERM = 6

    @property
    def sentence(self) -> str:
        """What status.json says."""
        return {
            Reason.NONE: "",
            Reason.TIME: "training.max_minutes are over",
            Reason.FILE: f"the file {STOP_FILE} in the run's folder",
            Reason.LAUNCHER: "the launcher of the processes has ended",
        }.get(self, f"signal {self.name}")


SIGNALS = {getattr(signal, reason.name): reason for reason in (Reason.SIGINT, Reason.SIGUSR1, Reason.SIGTERM)}


class StopRequests:
    """What this process has been asked. Made in the main thread, as early as possible."""

    def __init__(self) -> None:
        self.reason = Reason.NONE
        self.requested_at: float | None = None
        """time.monotonic() of the first request; None where there was none."""
        self.agreed = False
        """Whether all ranks have agreed to stop: then no step boundary has to come any more."""
        self._began = time.monotonic()
        self._joined = False
        self.said_elsewhere = False
        """Whether rank 0 says why this process leaves: a mistake, which all processes have found."""
        self._file: Path | None = None
        self._deadline: float | None = None
        self._launchers = launchers_above()
        self._reader, writer = os.pipe()
        os.set_blocking(writer, False)
        # The interpreter writes the signal's number into the pipe at once, even while the main thread waits inside a
        # collective; a handler in Python would have to wait for it to come back.
        self._old_wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._writer = writer
        self._old_handlers = {number: signal.signal(number, _leave_it_to_the_thread) for number in SIGNALS}
        if launcher_is_missing(os.environ, self._launchers):
            self.request(Reason.LAUNCHER)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stop requests", daemon=True)
        self._thread.start()

    def joined(self) -> None:
        """From now on the ranks agree before they stop."""
        self._joined = True
        if self.reason:
            self._leave()

    def watch_run(self, run_dir: Path, max_minutes: float | None) -> None:
        """Also watch the file STOP and the time since this process began; on one rank."""
        self._file = run_dir / STOP_FILE
        self._deadline = None if max_minutes is None else self._began + 60 * max_minutes

    def request(self, reason: Reason) -> None:
        """Note a request."""
        self.reason = max(self.reason, reason)
        if self.requested_at is None:
            self.requested_at = time.monotonic()

    def fulfilled(self) -> None:
        """The ranks have agreed to stop: take the file away, so that the next start is not stopped by it."""
        self.agreed = True
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _watch(self) -> None:
        while not self._closing.is_set():
            if select.select([self._reader], [], [], POLL_SECONDS)[0]:
                for number in os.read(self._reader, 64):
                    if number in SIGNALS:
                        self.request(SIGNALS[signal.Signals(number)])
            if not all(map(is_alive, self._launchers)):
                self._launchers = []
                self.request(Reason.LAUNCHER)
            if self._file is not None and self._file.exists():
                self.request(Reason.FILE)
            if self._deadline is not None and time.monotonic() > self._deadline:
                self.request(Reason.TIME)
            if self.reason and not self._joined:
                self._leave()

    def _leave(self) -> NoReturn:
        if not self.said_elsewhere:
            print(f"stopped before the run began: {self.reason.sentence}", file=sys.stderr, flush=True)
        os._exit(1)

    def close(self) -> None:
        """Give the signals back."""
        self._closing.set()
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wakeup)
        os.write(self._writer, b"\0")
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)


def _leave_it_to_the_thread(number: int, frame: FrameType | None) -> None:
    """Nothing: that a handler is set is what makes the interpreter write to the pipe."""
