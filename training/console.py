"""What a person sees while a run trains: a progress bar on a terminal, plain lines anywhere else."""

import math
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


class TrainingConsole:
    """Shows the step, its numbers and the remaining time, which is measured over this attempt's own steps."""

    def __init__(self, total_steps: int, first_step: int, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._total = total_steps
        self._since: tuple[int, float] | None = None  # the first step seen: what comes before it is start-up
        self._unsaid, self._why = 0, ""
        self._progress: Progress | None = None
        if self._stream.isatty():
            columns = (MofNCompleteColumn(), BarColumn(bar_width=20), TextColumn("{task.fields[numbers]}"))
            self._progress = Progress(*columns, console=Console(file=self._stream))
            self._task = self._progress.add_task("", total=total_steps, completed=first_step, numbers="starting")
            self._progress.start()

    def train(self, record: Mapping[str, Any]) -> None:
        """Shows a training record (see Monitor.train)."""
        numbers = describe(record, self._remaining(record["step"]))
        if self._progress:
            self._progress.update(self._task, completed=record["step"], numbers=numbers)
        else:
            self.say(f"step {record['step']}/{self._total}  {numbers}")

    def say(self, text: str) -> None:
        """Prints a line; on a terminal above the bar."""
        if self._unsaid:
            text = f"({self._unsaid} lines could not be written here: {self._why})\n{text}"
        try:
            if self._progress:
                self._progress.console.print(text, markup=False, highlight=False)
            else:
                print(text, file=self._stream, flush=True)
            self._unsaid = 0
        except OSError as error:  # a log on a full disk, a terminal that was closed: no reason to stop training
            self._unsaid += 1
            self._why = error.strerror or str(error)

    def _remaining(self, step: int) -> float | None:
        now = time.monotonic()
        if self._since is None:
            self._since = (step, now)
        first, began = self._since
        return (now - began) / (step - first) * (self._total - step) if step > first else None

    def close(self) -> None:
        """Leaves the terminal as it was."""
        if self._progress:
            self._progress.stop()
            self._progress = None


def describe(record: Mapping[str, Any], remaining: float | None) -> str:
    """The numbers of a record in one line; what is not known is left out."""
    parts = []
    formats = {
        "loss": "loss {:.4f}",
        "grad_norm": "grad norm {:.3f}",
        "learning_rate": "lr {:.2e}",
        "tokens_per_second": "{:,.0f} tokens/s",
    }
    for key, form in formats.items():
        if isinstance(record.get(key), int | float):
            parts.append(form.format(record[key]))
    if record.get("mfu") is not None:
        parts.append(f"MFU {100 * record['mfu']:.1f} %")
    if record.get("skipped"):
        parts.append("SKIPPED (not finite)")
    if remaining is not None and math.isfinite(remaining):
        parts.append(f"{duration(remaining)} left")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Seconds as people say them: 42 s, 3 min 05 s, 2 h 07 min, 3 d 04 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"
