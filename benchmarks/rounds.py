"""Contestants in processes of their own that run a step when told to, so that two can be timed in turn in one run.

A contestant may be several processes (the stages of a pipeline). While one runs, the other waits on a pipe and
computes nothing. Rounds go A B B A, so that a machine that gets slower does not favour either.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from parallel.environment import Environment, read_environment

Step = Callable[[], None]


def _serve(connection: Connection, environment: Environment, prepare: Callable[..., Step], arguments: tuple[Any, ...]):
    import torch

    torch.set_num_threads(1)
    step = prepare(environment, *arguments)
    connection.send("ready")
    while connection.recv():
        step()
        connection.send("done")


class Contestant:
    """One or several processes that prepare once and then run a step whenever `seconds` is called."""

    def __init__(self, prepare: Callable[..., Step], *arguments: Any, processes: int = 1) -> None:
        """`prepare(environment, *arguments)` is called in each process and returns its step."""
        context = get_context("spawn")
        port = read_environment({}).port
        self._connections, self._processes = [], []
        for rank in range(processes):
            mine, theirs = context.Pipe()
            environment = Environment(rank, rank, processes, "127.0.0.1", port, "torch")
            process = context.Process(target=_serve, args=(theirs, environment, prepare, arguments), daemon=True)
            process.start()
            self._connections.append(mine)
            self._processes.append(process)
        for connection in self._connections:
            connection.recv()

    def seconds(self) -> float:
        """Run one step in all processes and return how long the slowest took."""
        started = time.perf_counter()
        for connection in self._connections:
            connection.send(True)
        for connection in self._connections:
            connection.recv()
        return time.perf_counter() - started

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            connection.send(False)
        for process in self._processes:
            process.join(timeout=20)
            process.kill()


@contextmanager
def contest(a: Contestant, b: Contestant) -> Iterator[tuple[Contestant, Contestant]]:
    """Both contestants, closed at the end."""
    try:
        yield a, b
    finally:
        a.close()
        b.close()


def time_in_turn(a: Contestant, b: Contestant, pairs: int) -> list[tuple[float, float]]:
    """Return `pairs` pairs of seconds (a, b), timed A B, B A, A B, ... after one step of each that is not counted."""
    a.seconds(), b.seconds()
    measured = []
    for number in range(pairs):
        if number % 2 == 0:
            first = a.seconds()
            measured.append((first, b.seconds()))
        else:
            second = b.seconds()
            measured.append((a.seconds(), second))
    return measured


def report(
    measured: list[tuple[float, float]], names: tuple[str, str], ratio: Callable[[float, float], float]
) -> float:
    """Print median seconds, the spread and the line `ratio R`: the median over pairs of `ratio(a, b)`."""
    for name, seconds in zip(names, zip(*measured, strict=True), strict=True):
        print(f"{name}: median {statistics.median(seconds):.3f} s a step, {min(seconds):.3f} to {max(seconds):.3f}")
    ratios = sorted(ratio(a, b) for a, b in measured)
    print(f"{len(ratios)} pairs, from {ratios[0]:.3f} to {ratios[-1]:.3f}")
    print(f"ratio {statistics.median(ratios):.3f}")
    return statistics.median(ratios)
