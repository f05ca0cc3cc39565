"""How ranks hear of each other while their main threads are busy, hung or gone.

A thread of each rank talks to the key-value store at which the ranks met, over a connection of its own: it says that
it lives, looks whether a failure was posted, and looks after its neighbours on the same machine by their process
numbers. Nothing here waits for another rank's main thread.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from training.failure import Failure
from training.processes import ProcessId, identify, is_alive, place

T = TypeVar("T")

POLL_SECONDS = 1.0
ANSWER_SECONDS = 5.0
"""A question that this rank must ask before it leaves may take so long: without a network it is never answered."""
SILENCE_SECONDS = 45.0
"""A rank that has not said for so long that it lives is taken for dead (its machine has lost power or network)."""


class Company:
    """What this rank knows of the others. `start` is collective."""

    def __init__(self, rank: int, world_size: int, address: str, port: int, name: str = "") -> None:
        self.rank = rank
        self.world_size = world_size
        self.failure: Failure | None = None
        """The first failure that was posted or found."""
        self.alarm = False
        """Whether some rank has found that no step gets finished."""
        self.lost = False
        """Whether the store, and so rank 0's process or its machine, is gone."""
        self.last_contact = time.monotonic()
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False)
        # `name` is the run's and the attempt's: a launcher's store may outlive both.
        self._store = dist.PrefixStore(f"mainline/{name}", store)
        self._neighbours: dict[int, ProcessId] = {}
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="company", daemon=True)

    def start(self) -> None:
        """Introduce this process and begin to look after the others."""
        self._store.set(f"who/{self.rank}", json.dumps(asdict(identify())))
        self._store.set(f"beat/{self.rank}", "0")
        everyone = self._store.multi_get([f"who/{rank}" for rank in range(self.world_size)])
        found = {rank: ProcessId(**json.loads(text)) for rank, text in enumerate(everyone) if rank != self.rank}
        self._neighbours = {rank: process for rank, process in found.items() if process.place == place()}
        self._thread.start()

    def post(self, failure: Failure) -> Failure:
        """Tell the others of a failure and return the one that was first."""
        if self.failure is None:
            text = json.dumps(asdict(failure))
            first = self._ask(lambda: self._store.compare_set("failure", "", text))
            self.failure = self.failure or (Failure(**json.loads(first)) if first else failure)
        return self.failure

    def raise_alarm(self, report: dict[str, object]) -> None:
        """Tell the others that no step gets finished, and what this rank was doing."""
        self.alarm = True
        self._ask(lambda: self._store.set(f"doing/{self.rank}", json.dumps(report)))
        self._ask(lambda: self._store.set("alarm", "1"))

    def reports(self, seconds: float) -> dict[int, dict[str, object]]:
        """What each rank was doing, as far as they say so within this time."""
        keys = {rank: f"doing/{rank}" for rank in range(self.world_size)}
        found: dict[int, dict[str, object]] = {}
        until = time.monotonic() + seconds
        try:
            while len(found) < self.world_size and time.monotonic() < until:
                for rank, key in keys.items():
                    if rank not in found and self._store.check([key]):
                        found[rank] = json.loads(self._store.get(key))
                time.sleep(0.2)
        except dist.DistError:
            self.lost = True
        return found

    def _ask(self, question: Callable[[], T]) -> T | None:
        """What the store answers; None, and it counts as lost, where it is gone or does not answer in time."""
        answers: list[T] = []

        def ask() -> None:
            with contextlib.suppress(dist.DistError):
                answers.append(question())

        asking = threading.Thread(target=ask, name="question", daemon=True)
        asking.start()
        asking.join(ANSWER_SECONDS)
        if not answers:
            self.lost = True
            return None
        return answers[0]

    def _watch(self) -> None:
        number = 0
        while not self._closing.wait(POLL_SECONDS):
            number += 1
            self._look_after_neighbours()
            try:
                self._listen(number)
                self.last_contact = time.monotonic()
            except dist.DistError:
                self._closing.wait(1.0)  # an end that was agreed upon comes first
                if not self._closing.is_set():
                    self.lost = True
                    self._find(0, "it ended without a word, or its machine cannot be reached")
                return

    def _listen(self, number: int) -> None:
        self._store.set(f"beat/{self.rank}", str(number))
        if self._store.check(["failure"]):
            self.failure = self.failure or Failure(**json.loads(self._store.get("failure")))
        if not self.alarm and self._store.check(["alarm"]):
            self.alarm = True
        if self.rank == 0 and number % 5 == 0:
            self._look_for_silent_ranks()

    def _look_after_neighbours(self) -> None:
        for rank, process in self._neighbours.items():
            if not is_alive(process) and not self._closing.wait(0.5):
                # It may have posted why it leaves just before.
                self._find(rank, "its process ended without a word: killed, or out of memory")
                return

    def _look_for_silent_ranks(self) -> None:
        now = time.monotonic()
        beats = self._store.multi_get([f"beat/{rank}" for rank in range(self.world_size)])
        for rank, beat in enumerate(beats):
            if self._beats.get(rank, (b"", 0.0))[0] != beat:
                self._beats[rank] = (beat, now)
            elif now - self._beats[rank][1] > SILENCE_SECONDS:
                self._find(rank, f"no sign of life for {SILENCE_SECONDS:.0f} s: its machine or the network is down")

    def _find(self, rank: int, reason: str) -> None:
        """Another rank is dead; unless a failure was posted before, that is the first one."""
        if self.failure is None and not self._closing.is_set():
            self.post(Failure(rank, reason, found_by=self.rank))

    def part(self) -> None:
        """From now on others may leave: called by each rank before the last barrier."""
        self._closing.set()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
