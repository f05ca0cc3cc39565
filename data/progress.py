"""A progress line over bytes: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class Progress:
    """`with Progress("tokenising", total) as progress: progress.add(bytes)`; speaks on standard error."""

    def __init__(self, label: str, total: int, stream: TextIO | None = None, quiet_seconds: float = 10.0) -> None:
        """`quiet_seconds` pass between two plain lines; a bar is redrawn ten times a second."""
        self.label, self.total, self.done = label, total, 0
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._pause = 0.1 if self._is_terminal else quiet_seconds
        self._started = time.monotonic()
        self._next = self._started + self._pause

    def add(self, amount: int) -> None:
        """Count `amount` bytes as done."""
        self.done += amount
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._pause
            self._write(now)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._write(time.monotonic())
        if self._is_terminal:
            self._stream.write("\n")
            self._stream.flush()

    def _write(self, now: float) -> None:
        seconds = max(now - self._started, 1e-9)
        rate = self.done / seconds
        share = self.done / self.total if self.total else 1.0
        left = (self.total - self.done) / rate if rate else 0.0
        ending = f"{duration(left)} left" if self.done < self.total else f"in {duration(seconds)}"
        text = f"{self.label} {share:4.0%}  {size(self.done)} of {size(self.total)}  {size(rate)}/s  {ending}"
        if self._is_terminal:
            filled = int(24 * min(share, 1.0))
            self._stream.write(f"\r[{'#' * filled}{'.' * (24 - filled)}] {text:<70}")
        else:
            self._stream.write(text + "\n")
        self._stream.flush()


def size(amount: float) -> str:
    """Bytes for a person: 11.1 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def duration(seconds: float) -> str:
    """Seconds for a person: 42 s, 12 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
