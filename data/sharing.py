"""Work shared out over one process, several workers of this machine, or MPI ranks: the same three calls for each.

Tasks go out one at a time, the largest first, to whoever is free; results come back in the order of the tasks. Nothing
in a result may depend on who worked. Under MPI rank 0 works too, and answers the others between two batches of its own;
they ask for a task before they have finished the one at hand, so they do not wait for the answer.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol

import numpy as np

from data.errors import DataError

Tick = Callable[[int], None]
Work = Callable[[Any, Tick], Any]

# Variables that mpirun and srun set for each process they start under MPI, some with the number of processes.
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_SIZE")
MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
ASK, ANSWER, RESULT, COUNT, READY = 1, 2, 3, 4, 5  # message tags
NO_MORE = -1


class Team(Protocol):
    """Those who work together."""

    size: int
    leads: bool
    """Whether this process plans, speaks and finishes; exactly one does."""

    def agree(self, plan: Callable[[], Any]) -> Any:
        """What `plan` gives, computed by the one that leads and known to all. Its DataError is raised in all."""
        ...

    def run(self, work: Work, tasks: Sequence[Any], costs: Sequence[int], tick: Tick) -> list[Any]:
        """`work(task, tick)` for each task by someone; the results, where this process leads, else an empty list.

        All call it with the same tasks."""
        ...


def largest_first(costs: Sequence[int]) -> list[int]:
    """Numbers of the tasks, the most costly first, equal ones in their order."""
    return sorted(range(len(costs)), key=lambda index: -costs[index])


class Alone:
    """This process does everything."""

    size, leads = 1, True

    def agree(self, plan: Callable[[], Any]) -> Any:
        """As in Team."""
        return plan()

    def run(self, work: Work, tasks: Sequence[Any], costs: Sequence[int], tick: Tick) -> list[Any]:
        """As in Team."""
        return [work(task, tick) for task in tasks]


_shared_count: Any = None


def _begin_worker(count: Any) -> None:
    global _shared_count
    _shared_count = count
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _work_in_worker(work: Work, task: Any) -> Any:
    def tick(amount: int) -> None:
        with _shared_count.get_lock():
            _shared_count.value += amount

    return work(task, tick)


class Workers:
    """This process leads, `size` others work."""

    leads = True

    def __init__(self, size: int) -> None:
        self.size = size
        context = multiprocessing.get_context("spawn")  # a fork would copy threads' locks
        self._count = context.Value("q", 0)
        self._pool = concurrent.futures.ProcessPoolExecutor(size, context, _begin_worker, (self._count,))

    def close(self) -> None:
        """End the workers; what they have not begun is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def agree(self, plan: Callable[[], Any]) -> Any:
        """As in Team."""
        return plan()

    def run(self, work: Work, tasks: Sequence[Any], costs: Sequence[int], tick: Tick) -> list[Any]:
        """As in Team. Raises DataError where a worker was killed."""
        self._count.value = 0
        futures = {index: self._pool.submit(_work_in_worker, work, tasks[index]) for index in largest_first(costs)}
        reported, waiting = 0, set(futures.values())
        try:
            while waiting:
                done, waiting = concurrent.futures.wait(waiting, 0.2, concurrent.futures.FIRST_EXCEPTION)
                for future in done:
                    future.result()  # a failure ends the rest
                reported, before = self._count.value, reported
                tick(reported - before)
        except BrokenProcessPool as error:
            raise DataError(
                f"--workers {self.size}: expected every worker to live, found one that was killed (out of memory?)"
            ) from error
        return [futures[index].result() for index in range(len(tasks))]


class Ranks:
    """The processes of an MPI world."""

    def __init__(self, communicator: Any) -> None:
        from mpi4py import MPI

        self._mpi, self._world = MPI, communicator
        self.size, self._rank = communicator.Get_size(), communicator.Get_rank()
        self.leads = self._rank == 0
        os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def agree(self, plan: Callable[[], Any]) -> Any:
        """As in Team."""
        outcome: tuple[Any, str | None] = (None, None)
        if self.leads:
            try:
                outcome = (plan(), None)
            except DataError as error:
                outcome = (None, str(error))
            ready = [self._world.isend(None, dest=rank, tag=READY) for rank in range(1, self.size)]
            for sent in ready:
                sent.wait()
        else:
            while not self._world.Iprobe(source=0, tag=READY):  # a broadcast would wait at full load, for minutes
                time.sleep(0.005)
            self._world.recv(source=0, tag=READY)
        value, problem = self._world.bcast(outcome, root=0)
        if problem is not None:
            raise DataError(problem)
        return value

    def run(self, work: Work, tasks: Sequence[Any], costs: Sequence[int], tick: Tick) -> list[Any]:
        """As in Team."""
        results: list[Any] = []
        if self.leads:
            results = self.agree(lambda: self._lead(work, tasks, costs, tick))
        else:
            self._help(work, tasks)
            self.agree(lambda: None)
        return results if self.leads else []

    def _lead(self, work: Work, tasks: Sequence[Any], costs: Sequence[int], tick: Tick) -> list[Any]:
        queue = largest_first(costs)[::-1]
        results: list[Any] = [None] * len(tasks)
        out, helpers = 0, self.size - 1  # tasks given to others, and others who were not told that there are no more
        problem: str | None = None
        under_way: list[Any] = []  # an unfinished send must be kept, or its buffer goes

        def answer() -> None:
            """Deal with every message that is there."""
            nonlocal out, helpers, problem
            status = self._mpi.Status()
            while self._world.Iprobe(status=status):
                source, tag = status.Get_source(), status.Get_tag()
                message = self._world.recv(source=source, tag=tag)
                if tag == COUNT:
                    tick(message)
                elif tag == RESULT:
                    index, result, failure = message
                    results[index] = result
                    problem = problem or failure
                    out -= 1
                else:
                    index = queue.pop() if queue and problem is None else NO_MORE
                    helpers -= index == NO_MORE
                    out += index != NO_MORE
                    number = np.array([index], dtype=np.int64)
                    under_way[:] = [(sent, buffer) for sent, buffer in under_way if not sent.Test()]
                    under_way.append((self._world.Isend(number, dest=source, tag=ANSWER), number))

        def tick_and_answer(amount: int) -> None:
            tick(amount)
            answer()

        while helpers or out or (queue and problem is None):
            answer()
            if queue and problem is None:
                index = queue.pop()
                try:
                    results[index] = work(tasks[index], tick_and_answer)
                except DataError as error:
                    problem = problem or str(error)
            else:
                time.sleep(0.001)
        for sent, _ in under_way:
            sent.Wait()
        if problem is not None:
            raise DataError(problem)
        return results

    def _help(self, work: Work, tasks: Sequence[Any]) -> None:
        def ask() -> tuple[Any, np.ndarray]:
            number = np.empty(1, dtype=np.int64)
            coming = self._world.Irecv(number, source=0, tag=ANSWER)
            self._world.send(None, dest=0, tag=ASK)
            return coming, number

        unreported, last = 0, time.monotonic()

        def tick(amount: int) -> None:
            nonlocal unreported, last
            unreported += amount
            if time.monotonic() - last > 0.5:
                self._world.send(unreported, dest=0, tag=COUNT)
                unreported, last = 0, time.monotonic()

        coming, number = ask()
        coming.Wait()
        while (index := int(number[0])) != NO_MORE:
            coming, number = ask()
            result, failure = None, None
            try:
                result = work(tasks[index], tick)
            except DataError as error:
                failure = str(error)
            self._world.send(unreported, dest=0, tag=COUNT)
            unreported = 0
            self._world.send((index, result, failure), dest=0, tag=RESULT)
            coming.Wait()


@contextlib.contextmanager
def assemble(workers: int) -> Iterator[Team]:
    """The team that this process is in: an MPI world where mpirun or srun started one, else `workers` processes."""
    if any(name in os.environ for name in MPI_RANKS):
        yield from _ranks(workers)
    elif _is_bare_slurm_task():
        raise DataError(
            f"srun: expected MPI between the {os.environ['SLURM_NTASKS']} tasks, found none: start them with "
            "`srun --mpi=pmix` (or `mpirun`), or one task with --workers"
        )
    elif workers > 1:
        team = Workers(workers)
        try:
            yield team
        finally:
            team.close()
    else:
        yield Alone()


def own_rank() -> int:
    """This process's rank in the MPI world, or 0, or its number among Slurm tasks that do not know of each other."""
    names = (*MPI_RANKS, "SLURM_PROCID") if "SLURM_STEP_ID" in os.environ else MPI_RANKS
    return next((int(os.environ[name]) for name in names if name in os.environ), 0)


def _is_bare_slurm_task() -> bool:
    """Whether srun started this process as one of several that do not know of each other."""
    return "SLURM_STEP_ID" in os.environ and "SLURM_PROCID" in os.environ and int(os.environ["SLURM_NTASKS"]) > 1


def _ranks(workers: int) -> Iterator[Team]:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise DataError(
            f"mpirun: expected mpi4py and an MPI library that it can load, found: {' '.join(str(error).split())}"
        ) from error
    team = Ranks(MPI.COMM_WORLD)
    said = [int(os.environ[name]) for name in MPI_SIZES if name in os.environ]
    if said and team.size != said[0]:
        raise DataError(
            f"mpirun: expected a world of {said[0]} processes, found {team.size}: mpi4py uses another MPI library than "
            "the mpirun that started it"
        )
    if workers > 1 and team.size > 1:
        raise DataError(f"--workers {workers}: expected no --workers under MPI, where each of {team.size} ranks works")
    try:
        yield team
    except (DataError, GeneratorExit):
        raise
    except BaseException:
        traceback.print_exc()
        MPI.COMM_WORLD.Abort(1)
