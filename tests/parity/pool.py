"""Processes that are started once for each number of them and then run many cases.

`Pool.run(size, "tests.parity.probes:train", arguments)` calls that function on every rank of a world of `size`
processes and returns what each rank's call returned. Arguments and results are JSON, sent through pipes. A case that
fails or does not end in time is an error of that case alone: its processes are killed, and the next case gets fresh
ones.
"""

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# Imported once, in a process that all others are forked from: it takes seconds and memory.
PRELOADED = [
    "torch",
    "torch._dynamo",  # which torch's optimizers import at their first step
    "torch.fx.experimental.symbolic_shapes",
    "deepspeed",
    "tests.parity.probes",
    "tests.parity.experiments",
]
ROOT = Path(__file__).resolve().parent.parent.parent


# A process that is stopped cannot see that its parent was killed. This one is told the ids and kills them then.
GUARDIAN = """
import os, signal, sys
alive = set()
for line in sys.stdin:
    (alive.add if line[0] == "+" else alive.discard)(int(line[1:]))
for pid in alive:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


class CaseFailed(Exception):
    """A case raised on some rank, or did not end in time."""


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def calm_network_threads() -> None:
    """Let gloo's threads of this process run only where nothing else wants to.

    Each process group has one, which wakes a hundred times a second, and where a message comes before it is asked for,
    tries again without a pause. With more processes than cores that is time which the others want.
    """
    for thread in os.listdir("/proc/self/task") if sys.platform == "linux" else []:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            if Path(f"/proc/self/task/{thread}/comm").read_text().startswith("gloo_tcp_loop"):
                os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))


def _work(rank: int, size: int, port: int, connection: Connection, log: str) -> None:
    """Body of a process: join the world, then answer one request after another until the pipe closes."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(ROOT)
    # A process group whose last parent ends gets SIGHUP where some of it are stopped: these must not be in that group.
    os.setsid()
    requests: list[bytes] = []
    arrived = threading.Semaphore(0)

    def read() -> None:
        # In a thread of its own, so that this process ends with its parent even inside a collective that hangs.
        try:
            while True:
                requests.append(connection.recv_bytes())
                arrived.release()
        except (EOFError, OSError):
            os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    import torch

    from parallel.device import initialize_distributed
    from parallel.environment import Environment

    torch.set_num_threads(1)
    device = initialize_distributed(
        Environment(rank, rank, size, "127.0.0.1", port, "torch"), timeout=timedelta(seconds=300)
    )
    while True:
        arrived.acquire()
        request = json.loads(requests.pop(0))
        began = time.process_time()
        try:
            module, name = request["probe"].split(":")
            result = {"result": getattr(importlib.import_module(module), name)(device, **request["arguments"])}
        except BaseException as error:
            result = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        # A case ends with a collection; half a second of it was spent on all that is imported.
        gc.freeze()
        result["cpu"] = time.process_time() - began
        connection.send_bytes(json.dumps(result).encode())


class World:
    """Processes with one process group."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.size = size
        self.log = tempfile.NamedTemporaryFile(prefix=f"parity-{size}-", suffix=".log")  # noqa: SIM115
        self.cpu_seconds = 0.0
        self.connections: list[Connection] = []
        self.processes = []
        port = _free_port()
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, size, port, theirs, self.log.name), daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def run(self, probe: str, arguments: dict[str, Any], timeout: float) -> list[Any]:
        """Call the probe on every rank and return all results; raises `CaseFailed`, and is then of no further use."""
        request = json.dumps({"probe": probe, "arguments": arguments}).encode()
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        for connection in self.connections:
            connection.send_bytes(request)
        while len(results) + len(failures) < self.size:
            missing = [r for r in range(self.size) if r not in results and r not in failures]
            ready = wait([self.connections[r] for r in missing], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                where = ", ".join(map(str, missing))
                said = "".join(failures.values()) or Path(self.log.name).read_text(errors="replace")[-2000:]
                raise CaseFailed(f"{probe}: rank {where} of {self.size} did not answer in {timeout:.0f} s\n{said}")
            for rank in missing:
                if self.connections[rank] not in ready:
                    continue
                try:
                    answer = json.loads(self.connections[rank].recv_bytes())
                except (EOFError, ConnectionError):
                    answer = {"error": "the process died", "traceback": Path(self.log.name).read_text()[-2000:]}
                if "error" in answer:
                    failures[rank] = f"rank {rank}: {answer['error']}\n{answer['traceback']}\n"
                    # The others may wait for this one in a collective.
                    deadline = min(deadline, time.monotonic() + 3.0)
                else:
                    results[rank] = answer["result"]
                    self.cpu_seconds += answer["cpu"]
        if failures:
            raise CaseFailed(f"{probe}: {failures[min(failures)]}")
        return [results[rank] for rank in range(self.size)]

    @property
    def pids(self) -> list[int]:
        """Of all processes."""
        return [process.pid for process in self.processes if process.pid is not None]

    def send(self, number: signal.Signals) -> None:
        """Send this to all processes: SIGSTOP where nothing is asked of them, as gloo's threads never rest."""
        for process in self.processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, number)

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
        for process, connection in zip(self.processes, self.connections, strict=True):
            process.join()
            process.close()
            connection.close()
        self.log.close()


class Pool:
    """A world of each size, started when first asked for."""

    def __init__(self) -> None:
        self.worlds: dict[int, World] = {}
        self._cpu_of_closed = 0.0
        command = [sys.executable, "-c", GUARDIAN]
        # In a session of its own, so that Ctrl-C does not end it before the others.
        self._guardian = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)

    @property
    def cpu_seconds(self) -> float:
        """Of all processes, over all requests that were answered: the cost, whatever else the machine does."""
        return self._cpu_of_closed + sum(world.cpu_seconds for world in self.worlds.values())

    def _guard(self, sign: str, pids: list[int]) -> None:
        assert self._guardian.stdin is not None
        self._guardian.stdin.writelines(f"{sign}{pid}\n" for pid in pids)
        self._guardian.stdin.flush()

    def _close(self, size: int) -> None:
        world = self.worlds.pop(size)
        pids = world.pids
        self._cpu_of_closed += world.cpu_seconds
        world.close()
        self._guard("-", pids)

    def run(self, size: int, probe: str, arguments: dict[str, Any], timeout: float = 120.0) -> list[Any]:
        """Call `probe` ("module:function", taking the device and these arguments) on `size` processes."""
        if size not in self.worlds:
            self.worlds[size] = World(size)
            self._guard("+", self.worlds[size].pids)
        self.worlds[size].send(signal.SIGCONT)
        try:
            results = self.worlds[size].run(probe, arguments, timeout)
        except BaseException:
            self._close(size)
            raise
        self.worlds[size].send(signal.SIGSTOP)
        return results

    def close(self) -> None:
        """End all processes."""
        for size in list(self.worlds):
            self._close(size)
        self._guardian.communicate()


@contextlib.contextmanager
def open_pool() -> Iterator[Pool]:
    """A pool that leaves no process behind."""
    # Before torch is imported anywhere: many processes share few cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # The server that forks finds the tests' own modules by this.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    pool = Pool()
    try:
        yield pool
    finally:
        pool.close()
