"""Progress of a command over more than a few seconds: a bar on a terminal, a line now and then anywhere else."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

QUIET_SECONDS = 3.0
LINE_SECONDS = 10.0


class Bar:
    """Counts `total` units of work to standard error, with rate and remaining time."""

    def __init__(self, label: str, total: float, unit: str) -> None:
        self._label, self._total, self._unit = label, max(total, 1), unit
        self._done = 0.0
        self._began = time.monotonic()
        self._next_line = self._began + QUIET_SECONDS
        self._progress: Progress | None = None
        if sys.stderr.isatty():
            columns = (TextColumn(label), BarColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._progress.add_task(label, total=self._total, rate="")

    def advance(self, units: float) -> None:
        """Counts units that are done."""
        self._done += units
        now = time.monotonic()
        rate = self._done / max(now - self._began, 1e-9)
        if self._progress:
            self._progress.update(self._task, completed=self._done, rate=f"{rate:,.0f} {self._unit}/s")
        elif now >= self._next_line:
            self._next_line = now + LINE_SECONDS
            left = (self._total - self._done) / max(rate, 1e-9)
            share = 100 * self._done / self._total
            print(
                f"{self._label}: {share:.0f} %, {rate:,.0f} {self._unit}/s, {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    def __enter__(self) -> Self:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress:
            self._progress.stop()


def peak_memory() -> int:
    """The most bytes this process has held so far. (ru_maxrss would count a large parent's memory, too.)"""
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
