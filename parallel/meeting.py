"""How the processes of a run find each other, and what is said where they cannot.

Before the process group is made, over plain TCP: every process reaches rank 0, rank 0 sees every process, and a process
of each node reaches those of the other nodes. The group itself would wait for its own time limit, half an hour or
more, and name nobody.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch.distributed as dist

from parallel.environment import Environment, LaunchError

MEETING_SECONDS = 600.0
"""So long may processes start one after another: many nodes read Python and torch from one file system."""
UNREACHABLE_SECONDS = 15.0
"""So long may a host not answer at all, before the network is called broken. A refusal is an answer: it is up."""
CONNECT_SECONDS = 5.0
STORE_SECONDS = 60.0
ANSWER_SECONDS = 2.0
"""The others read rank 0's word from its process, so it stays a little."""
ALL_PAIRS = 32
"""Up to so many nodes each is tried with each other one; of more, with those 1, 2, 4, 8 ... further on."""


class PreflightError(LaunchError):
    """The machines or the network between them are not fit for the run."""


@dataclass(frozen=True)
class Node:
    """A node, as the first of its processes introduced itself."""

    rank: int
    host: str
    address: str
    port: int


def meet(environment: Environment, seconds: float = MEETING_SECONDS) -> dist.Store:
    """Bring all processes together at rank 0's store and try the network between their nodes. Collective.

    `seconds` is how long this process waits for rank 0 to come.

    Raises PreflightError where a process cannot be reached or does not come, and torch's DistNetworkError where rank 0
    cannot listen at the port.
    """
    # torchrun listens at the address itself, and goes on doing so after a restart of its processes.
    is_master = environment.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not is_master:
        _wait_for_rank_0(environment, seconds)
    limit = timedelta(seconds=STORE_SECONDS)
    plain = dist.TCPStore(
        environment.address, environment.port, is_master=is_master, timeout=limit, wait_for_workers=False
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"meeting/{attempt}", plain)
    try:
        with _listener(environment) as node:
            store.set(f"here/{environment.rank}", json.dumps(vars(node)))
            nodes = _wait_for_all(store, environment)
            if len(nodes) > 1:
                _try_network(store, environment, node, nodes)
    except PreflightError:
        if is_master:
            time.sleep(ANSWER_SECONDS)
        raise
    except dist.DistError as error:
        said = str(error).splitlines()[0][:200]
        raise PreflightError(
            f"{_host()} has lost rank 0 at {environment.address}:{environment.port}: {said}",
            alone=environment.local_rank == 0,
        ) from error
    return dist.PrefixStore(f"group/{attempt}", plain)


def _host() -> str:
    return os.uname().nodename


def _wait_for_rank_0(environment: Environment, seconds: float) -> None:
    """Return when something listens at rank 0's port; PreflightError where its host does not answer."""
    began = time.monotonic()
    silent_since: float | None = None
    while True:
        try:
            socket.create_connection((environment.address, environment.port), timeout=CONNECT_SECONDS).close()
            return
        except ConnectionRefusedError as error:  # the host is there, rank 0 has not come yet
            silent_since, problem = None, str(error)
        except OSError as error:
            silent_since, problem = silent_since or time.monotonic(), str(error)
        waited = time.monotonic() - began
        if silent_since is not None and time.monotonic() - silent_since > UNREACHABLE_SECONDS or waited > seconds:
            raise PreflightError(
                f"{_host()} (rank {environment.rank}) cannot reach rank 0 at {environment.address}:{environment.port} "
                f"after {waited:.0f} s: {problem}",
                alone=environment.local_rank == 0,
            )
        time.sleep(0.1)


# ---- who is here


@contextlib.contextmanager
def _listener(environment: Environment) -> Iterator[Node]:
    """This process as others may reach it: the first of a node answers whoever connects, until the block ends."""
    address = _own_address(environment)
    if environment.local_rank != 0 or environment.world_size == 1:
        yield Node(environment.rank, _host(), address, 0)
        return
    with socket.create_server(("", 0), backlog=128) as server:
        server.settimeout(0.2)  # a thread that waits in accept does not notice that the socket is closed
        threading.Thread(target=_answer, args=(server,), name="preflight", daemon=True).start()
        yield Node(environment.rank, _host(), address, server.getsockname()[1])


def _answer(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(CONNECT_SECONDS)
                connection.sendall(connection.recv(64))
        except OSError:  # nobody came, or went away again, or the block has ended
            if server.fileno() < 0:
                return


def _own_address(environment: Environment) -> str:
    """The address at which this node's traffic arrives: of the interface that was chosen, or towards rank 0."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        for found in psutil.net_if_addrs().get(os.environ.get(name, ""), []):
            if found.family == socket.AF_INET:
                return found.address
    if environment.rank == 0:
        return environment.address
    family, kind, protocol, _, place = socket.getaddrinfo(
        environment.address, environment.port, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)  # sends nothing: it only asks which way
        return str(probe.getsockname()[0])


def _wait_for_all(store: dist.Store, environment: Environment) -> list[Node]:
    """All nodes, in the order of their first ranks. Rank 0 looks for everybody, the others wait for its word."""
    if environment.rank == 0:
        store.set("all", json.dumps(_look_for_all(store, environment.world_size)))
    store.wait(["all"], timedelta(seconds=MEETING_SECONDS + STORE_SECONDS))
    answer = json.loads(store.get("all"))
    if "error" in answer:
        raise PreflightError(answer["error"])
    return [Node(**node) for node in answer["nodes"]]


def _look_for_all(store: dist.Store, world_size: int) -> dict[str, object]:
    missing, until = list(range(world_size)), time.monotonic() + MEETING_SECONDS
    while missing:
        missing = [rank for rank in missing if not store.check([f"here/{rank}"])]
        if missing and time.monotonic() > until:
            some = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            return {
                "error": f"{len(missing)} of {world_size} processes did not come in {MEETING_SECONDS:.0f} s: {some}"
            }
        time.sleep(0.02)
    everybody = [json.loads(store.get(f"here/{rank}")) for rank in range(world_size)]
    return {"nodes": [one for one in everybody if one["port"]]}


# ---- the network between nodes


def partners(number: int, nodes: int) -> list[int]:
    """Which nodes this one is tried with: all others, or of many those at a distance of 1, 2, 4, 8 ..."""
    if nodes <= ALL_PAIRS:
        return [other for other in range(nodes) if other != number]
    return sorted({(number + 2**power) % nodes for power in range((nodes - 1).bit_length())} - {number})


def _try_network(store: dist.Store, environment: Environment, node: Node, nodes: list[Node]) -> None:
    """Each node connects to the others; PreflightError on every process where a pair cannot."""
    if environment.local_rank == 0:
        others = [nodes[other] for other in partners(nodes.index(node), len(nodes))]
        with ThreadPoolExecutor(max_workers=16) as pool:
            problems = [problem for problem in pool.map(_try_node, others) if problem]
        store.set(f"tried/{environment.rank}", json.dumps(problems))
    if environment.rank == 0:
        found: list[str] = []
        for other in nodes:
            try:
                found += json.loads(store.get(f"tried/{other.rank}"))
            except dist.DistError:
                found.append(f"{other.host} (rank {other.rank}) no longer answers {node.host}")
        store.set("network", json.dumps(found))
    if found := json.loads(store.get("network")):
        more = f" (and {len(found) - 4} more)" if len(found) > 4 else ""
        raise PreflightError("the network is broken: " + "; ".join(found[:4]) + more)


def _try_node(node: Node) -> str | None:
    try:
        with socket.create_connection((node.address, node.port), timeout=CONNECT_SECONDS) as connection:
            connection.sendall(b"mainline")
            if connection.recv(64) == b"mainline":
                return None
            problem = "another program answers"
    except OSError as error:
        problem = str(error)
    return f"{_host()} cannot reach {node.host} at {node.address}:{node.port} ({problem})"
