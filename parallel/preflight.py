"""What every node is and has, said in one line a node at each start; and whether they fit each other.

Nodes whose software or devices differ give a run that hangs, or that cannot be repeated: then it does not begin. A few
bytes and a few megabytes go within each node and from each node to the next, with a time limit, so that a network that
connects but does not carry is found here, with the pair named.
"""

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from parallel.environment import Environment
from parallel.exchange import barrier, gather_json
from parallel.meeting import PreflightError

ALIKE = ("device", "driver", "torch", "deepspeed", "nccl")
"""What must be the same on all nodes."""
PROBE_SECONDS = 30.0
"""For a pair. The first message on a network of GPUs also sets their communicator up."""
PROBE_BYTES = {"cpu": 2**22, "cuda": 2**26}
GIB = 2**30


def preflight(environment: Environment, device: torch.device, folder: Path) -> list[str]:
    """One line for each node, on every process. Collective. `folder` is where the run writes.

    Raises PreflightError, on every process alike, where nodes differ or two processes share a device.
    """
    with _limit(environment, "a few bytes from every process to every other one", 2 * PROBE_SECONDS):
        found = gather_json(facts(environment, device, folder))
    if problems := differences(found):
        raise PreflightError("; ".join(problems))
    nodes = by_node(found)
    speeds = probe(environment, device, nodes)
    with _limit(environment, "a barrier of all processes", 2 * PROBE_SECONDS):
        barrier()
    for rank, sentences in enumerate(gather_json(speeds)):
        found[rank]["speeds"] = sentences
    return [describe(ranks, found) for ranks in nodes.values()]


# ---- what there is


def facts(environment: Environment, device: torch.device, folder: Path) -> dict[str, Any]:
    """What this process knows of its node, its device and its software."""
    import deepspeed

    name, driver, uuid, nccl = "cpu", "none", None, "none"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, uuid = properties.name, str(properties.uuid)
        with contextlib.suppress(OSError):
            driver = Path("/sys/module/nvidia/version").read_text().strip()
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return {
        "rank": environment.rank,
        "host": os.uname().nodename,
        "device": name,
        "driver": driver,
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "nccl": nccl,
        "uuid": uuid,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory": psutil.virtual_memory().available,
        "disk": shutil.disk_usage(existing).free,
    }


def by_node(found: list[dict[str, Any]]) -> dict[str, list[int]]:
    """The ranks of each node, nodes in the order of their first ranks."""
    nodes: dict[str, list[int]] = {}
    for fact in found:
        nodes.setdefault(fact["host"], []).append(fact["rank"])
    return nodes


def differences(found: list[dict[str, Any]]) -> list[str]:
    """A sentence for each thing that should be the same everywhere and is not, or is shared and should not be."""
    problems = []
    for key in ALIKE:
        hosts: dict[str, list[str]] = {}
        for fact in found:
            known = hosts.setdefault(str(fact[key]), [])
            if fact["host"] not in known:
                known.append(fact["host"])
        if len(hosts) > 1:
            each = " and ".join(f"{value} on {_some(names)}" for value, names in hosts.items())
            problems.append(f"the nodes differ: {key} is {each}")
    owners: dict[str, dict[str, Any]] = {}
    for fact in found:
        if fact["uuid"] is None:
            continue
        other = owners.setdefault(fact["uuid"], fact)
        if other is not fact:
            problems.append(
                f"rank {other['rank']} and rank {fact['rank']} on {fact['host']} share the device {fact['uuid']} "
                f"(CUDA_VISIBLE_DEVICES {fact['visible']})"
            )
    return problems


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def describe(ranks: list[int], found: list[dict[str, Any]]) -> str:
    """The line of one node: the least that any of its processes has."""
    facts = [found[rank] for rank in ranks]
    first = facts[0]
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_ranges(ranks)}"
    parts = [f"{first['host']}: {who} on {len(ranks)} x {first['device']}"]
    if (visible := sorted({fact["visible"] for fact in facts if fact["visible"]})) and visible:
        parts.append(f"visible {' | '.join(visible)}")
    parts += [f"{key} {first[key]}" for key in ("driver", "torch", "deepspeed", "nccl") if first[key] != "none"]
    cores, threads = min(fact["cores"] for fact in facts), max(fact["threads"] for fact in facts)
    parts.append(f"{cores} cores and {threads} threads a process")
    parts.append(f"{min(fact['memory'] for fact in facts) / GIB:.0f} GiB of memory free")
    parts.append(f"{min(fact['disk'] for fact in facts) / GIB:.0f} GiB of disk free")
    parts += [sentence for fact in facts for sentence in fact.get("speeds", [])]
    if threads > cores:
        parts.append("warning: more threads than cores (OMP_NUM_THREADS, --cpus-per-task)")
    elif cores == 1 and first["device"] != "cpu":
        parts.append("warning: one core a process (srun --cpus-per-task)")
    return ", ".join(parts)


def _ranges(ranks: list[int]) -> str:
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))


# ---- what it carries


def probe(environment: Environment, device: torch.device, nodes: dict[str, list[int]]) -> list[str]:
    """Send to the next process of the node, and from each node to the next one; what was measured, in words."""
    rounds = [[(ranks[0], ranks[1], "within") for ranks in nodes.values() if len(ranks) > 1]]
    leaders = [(ranks[0], host) for host, ranks in nodes.items()]
    edges = [(one[0], other[0], f"to {other[1]}") for one, other in zip(leaders, leaders[1:], strict=False)]
    # No process stands in two pairs of one round, so that nobody waits for somebody who waits.
    rounds += [edges[0::2], edges[1::2]]
    names = {rank: host for host, ranks in nodes.items() for rank in ranks}
    sentences = []
    for pairs in rounds:
        for one, other, where in pairs:
            if environment.rank not in (one, other):
                continue
            partner = other if environment.rank == one else one
            what = f"rank {one} on {names[one]} to rank {other} on {names[other]}"
            with _limit(environment, what, PROBE_SECONDS):
                speed = _ping(environment.rank == one, partner, device)
            if environment.rank == one:
                sentences.append(f"{speed / 1e9:.2g} GB/s {where}")
    return sentences


def _ping(is_first: bool, partner: int, device: torch.device) -> float:
    """Bytes a second to the partner and back: a few bytes first, which make the connection."""
    seconds, size = 0.0, PROBE_BYTES.get(device.type, 2**22)
    for count in (8, size):
        message = torch.ones(count, dtype=torch.uint8, device=device)
        began = time.perf_counter()
        for sends in (is_first, not is_first):
            if sends:
                dist.send(message, partner)
            else:
                dist.recv(message, partner)
        if int(message[-1]) != 1:
            raise RuntimeError(f"a message from rank {partner} arrived damaged")
        seconds = time.perf_counter() - began
    return 2 * size / seconds


@contextlib.contextmanager
def _limit(environment: Environment, what: str, seconds: float) -> Iterator[None]:
    """End this process where the block takes longer: it waits inside the network and cannot be called back."""
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(done, environment, what, seconds), name="preflight", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()


def _watch(done: threading.Event, environment: Environment, what: str, seconds: float) -> None:
    if done.wait(seconds):
        return
    sentence = f"the network does not carry {what}: nothing arrived for {seconds:.0f} s"
    first = True
    with contextlib.suppress(dist.DistError):  # where rank 0 is not to be reached either, everybody speaks
        store = dist.TCPStore(
            environment.address,
            environment.port,
            is_master=False,
            timeout=timedelta(seconds=5),
            wait_for_workers=False,
        )
        first = store.compare_set("preflight/broken", "", sentence) == sentence.encode()
    if first:
        print(f"error: {sentence}", file=sys.stderr, flush=True)
    if environment.rank == 0:
        time.sleep(2.0)  # the store ends with this process
    os._exit(1)
