"""A thread of each rank that ends it when it must end and its main thread cannot: after a hang, a signal that no step
boundary followed, or a failure of another rank.
"""

import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

from parallel.phase import Phase
from training.company import Company
from training.failure import (
    Failure,
    claim_report,
    is_of_communication,
    of_exception,
    report,
    say_traceback,
)
from training.processes import leave_now
from training.status import is_current
from training.stop_requests import StopRequests

POLL_SECONDS = 0.5
START_SECONDS = 600.0
"""Added to training.hang_seconds until the first step of a start is finished: building, loading and compiling."""
LAST_WORDS_SECONDS = 3.0
"""The rank that reports waits so long, so that the others have said what they have to say."""
FIRST_CAUSE_SECONDS = 10.0
"""A rank that only lost its partner waits so long for the partner's own failure."""
CONTACT_SECONDS = 60.0
ATTEMPT_SECONDS = 2.0


class Watchdog:
    """Watches this rank. `phase` is written by the main thread."""

    def __init__(
        self,
        phase: Phase,
        company: Company,
        stops: StopRequests,
        run_dir: Path,
        run_id: str,
        attempt: int,
        hang_seconds: float | None,
        grace_seconds: float,
    ) -> None:
        self.phase = phase
        self.company = company
        self.stops = stops
        self.run_dir = run_dir
        self.run_id = run_id
        self.attempt = attempt
        self.hang_seconds = hang_seconds
        self.grace_seconds = grace_seconds
        self.first_step = phase.step + 1
        self._main = threading.main_thread().ident
        self._leaving = threading.Lock()
        self._closing = threading.Event()
        self._attempt_seen = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._thread.join(timeout=5.0)

    # ---- what the main thread calls

    def fail(self, error: BaseException) -> NoReturn:
        """Leave because of an exception in the main thread; the others hear of it and leave too."""
        failure = of_exception(error, self.company.rank, self._doing())
        if failure.rank is not None:
            say_traceback(error, self.company.rank)
        if is_of_communication(error):
            until = time.monotonic() + FIRST_CAUSE_SECONDS
            while self.company.failure is None and time.monotonic() < until:
                time.sleep(0.1)
        self._leave(self.company.post(failure))

    # ---- the thread

    def _watch(self) -> None:
        while not self._closing.wait(POLL_SECONDS):
            if self.company.failure is not None:
                self._leave(self.company.failure)
            if self.company.alarm or self._is_hung():
                self._end_a_hang()
            if self._grace_is_over():
                self._write_stacks("grace")
                reason = (
                    f"asked to stop ({self.stops.reason.sentence}), but no step ended within {self.grace_seconds:g} s"
                )
                self._leave(
                    self.company.post(Failure(self.company.rank, f"{reason} ({self._doing()})", self.company.rank))
                )
            if time.monotonic() - self.company.last_contact > CONTACT_SECONDS:
                reason = f"no contact with rank 0 for {CONTACT_SECONDS:.0f} s"
                self.company.lost = True
                self._leave(Failure(self.company.rank, reason, self.company.rank))
            if time.monotonic() - self._attempt_seen > ATTEMPT_SECONDS:
                self._attempt_seen = time.monotonic()
                if not is_current(self.run_dir, self.attempt):
                    reason = f"a newer attempt has taken {self.run_dir} over"
                    self._leave(self.company.post(Failure(None, reason, self.company.rank, superseded=True)))

    def _is_hung(self) -> bool:
        if self.hang_seconds is None:
            return False
        starting = self.phase.step < self.first_step
        return time.monotonic() - self.phase.alive_at > self.hang_seconds + (START_SECONDS if starting else 0.0)

    def _grace_is_over(self) -> bool:
        asked = self.stops.requested_at
        return not self.stops.agreed and asked is not None and time.monotonic() - asked > self.grace_seconds

    def _doing(self) -> str:
        return f"step {self.phase.step + 1}, {self.phase.name}"

    def _end_a_hang(self) -> NoReturn:
        """Every rank writes what it was doing; rank 0 compares and names the one that is behind."""
        seconds = time.monotonic() - self.phase.since
        path = self._write_stacks("hang")
        self.company.raise_alarm(
            {
                "step": self.phase.step,
                "moves": self.phase.moves,
                "name": self.phase.name,
                "seconds": seconds,
                "waits": self._waits_for_others(),
            }
        )
        if self.company.rank == 0:
            behind, sentence = rank_behind(self.company.reports(seconds=10.0), self.company.world_size)
            reason = f"no step was finished for {self.hang_seconds or 0:g} s; {sentence}; see {path.parent}"
            self._leave(self.company.post(Failure(behind, reason, found_by=0)))
        until = time.monotonic() + 20.0
        while self.company.failure is None and time.monotonic() < until:
            time.sleep(0.1)
        self._leave(self.company.failure or Failure(self.company.rank, f"hung in {self._doing()}", self.company.rank))

    def _waits_for_others(self) -> bool:
        """Whether the main thread stands inside torch.distributed: then it is another rank that is behind."""
        frame = sys._current_frames().get(self._main or 0)
        while frame is not None:
            if "torch/distributed" in frame.f_code.co_filename.replace(os.sep, "/"):
                return True
            frame = frame.f_back
        return False

    def _write_stacks(self, folder: str) -> Path:
        """What this rank is doing, and the Python stacks of all its threads, for a person to read."""
        path = self.run_dir / folder / f"rank_{self.company.rank:05d}.txt"
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        seconds = time.monotonic() - self.phase.since
        lines = [
            f"rank {self.company.rank} of {self.company.world_size}, attempt {self.attempt}, process {os.getpid()}",
            f"steps finished: {self.phase.step}",
            f"phase: {self.phase.name}, for {seconds:.1f} s",
        ]
        for ident, frame in sys._current_frames().items():
            if ident != threading.get_ident():
                lines += [
                    "",
                    f"thread {names.get(ident, ident)}:",
                    *"".join(traceback.format_stack(frame)).splitlines(),
                ]
        text = "\n".join(lines) + "\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError as error:
            sys.stderr.write(f"warning: {path} could not be written ({error}), so here it is:\n{text}")
        return path

    def _leave(self, failure: Failure) -> NoReturn:
        """End this process. One rank reports: rank 0, or where it is gone whoever asks first."""
        self._leaving.acquire()  # never released: whichever thread comes second waits for the end
        company = self.company
        rank_0_is_gone = company.lost or (failure.rank == 0 and failure.found_by != 0)
        if company.rank == 0 or rank_0_is_gone:
            time.sleep(LAST_WORDS_SECONDS * (1 if company.rank == 0 else 2))
            if claim_report(self.run_dir, self.attempt):
                report(failure, self.run_dir, self.run_id, self.attempt, self.phase.step)
        leave_now(1)


def rank_behind(reports: dict[int, dict[str, object]], world_size: int) -> tuple[int | None, str]:
    """Which rank keeps the others waiting, and a sentence about it.

    A rank that says nothing is; else, of those that do not wait for others (of all, where all do), the one that has
    come least far.
    """
    silent = [rank for rank in range(world_size) if rank not in reports]
    if silent:
        return silent[0], f"rank {silent[0]} is behind: it does not answer"
    busy = [rank for rank, found in reports.items() if not found["waits"]] or list(reports)
    behind = min(busy, key=lambda rank: (reports[rank]["step"], reports[rank]["moves"], rank))
    found = reports[behind]
    doing = f"step {int(str(found['step'])) + 1}, {found['name']} for {float(str(found['seconds'])):.0f} s"
    return behind, f"rank {behind} is behind: {doing}"
