"""What is said before a run about its machines and the network between them."""

import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from parallel import meeting
from parallel.device import check_visible_devices, device_number
from parallel.environment import Environment, LaunchError
from parallel.meeting import PreflightError, meet, partners
from parallel.preflight import by_node, describe, differences

FACTS: dict[str, Any] = {
    "device": "NVIDIA H100", "driver": "550.54", "torch": "2.13.0", "deepspeed": "0.19.8", "nccl": "2.27.3",
    "visible": None, "cores": 12, "threads": 12, "memory": 2**40, "disk": 2**39,
}  # fmt: skip


def found(*changes: dict[str, Any], per_node: int = 2) -> list[dict[str, Any]]:
    """Facts of processes, two a node, each with its changes."""
    return [
        FACTS | {"rank": rank, "host": f"node{rank // per_node + 1}", "uuid": f"GPU-{rank}"} | change
        for rank, change in enumerate(changes)
    ]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_nodes_that_are_alike_have_a_line_each() -> None:
    facts = found({}, {"cores": 8}, {"visible": "4,5"}, {"visible": "4,5"})
    assert differences(facts) == []
    facts[0]["speeds"] = ["300 GB/s within", "40 GB/s to node2"]
    lines = [describe(ranks, facts) for ranks in by_node(facts).values()]
    assert lines[0] == (
        "node1: ranks 0-1 on 2 x NVIDIA H100, driver 550.54, torch 2.13.0, deepspeed 0.19.8, nccl 2.27.3, 8 cores and "
        "12 threads a process, 1024 GiB of memory free, 512 GiB of disk free, 300 GB/s within, 40 GB/s to node2, "
        "warning: more threads than cores (OMP_NUM_THREADS, --cpus-per-task)"
    )
    assert lines[1].startswith("node2: ranks 2-3 on 2 x NVIDIA H100, visible 4,5, driver")


def test_one_core_a_process_is_a_warning() -> None:
    facts = found({"cores": 1, "threads": 1}, {})
    assert describe([0, 1], [facts[0], facts[1] | {"threads": 1}]).endswith("one core a process (srun --cpus-per-task)")


@pytest.mark.parametrize("key", ["device", "driver", "torch", "deepspeed", "nccl"])
def test_nodes_that_differ_are_named(key: str) -> None:
    facts = found({}, {}, {key: "other"}, {key: "other"})
    assert differences(facts) == [f"the nodes differ: {key} is {FACTS[key]} on node1 and other on node2"]


def test_two_processes_on_one_device_are_named() -> None:
    (problem,) = differences(found({}, {"uuid": "GPU-0", "visible": "0"}))
    assert problem == "rank 0 and rank 1 on node1 share the device GPU-0 (CUDA_VISIBLE_DEVICES 0)"


@pytest.mark.parametrize(("local_rank", "visible", "number"), [(0, 8, 0), (3, 4, 3), (0, 1, 0), (5, 1, 0)])
def test_a_process_takes_its_own_device(local_rank: int, visible: int, number: int) -> None:
    assert device_number(local_rank, visible) == number


def test_more_processes_than_devices_are_refused() -> None:
    with pytest.raises(LaunchError, match="local rank 4 has no device: 4 are visible"):
        device_number(4, 4)


@pytest.mark.parametrize(
    ("given", "visible", "of_machine", "refused"),
    [
        ("4,5,6,7", "4,5,6,7", 8, False),
        ("4,5,6,7", "0,1,2,3", 8, True),  # deepspeed --num_gpus 4
        ("4,5,6,7", "0,1,2,3", 4, False),  # Slurm hides the others, and the job's own count from 0
        ("4,5,6,7", "5", 8, False),  # a device a task
        ("4,5", "GPU-a,GPU-b", 8, False),
        ("", "0,1", 8, False),
    ],
)
def test_devices_of_another_job_are_refused(given: str, visible: str, of_machine: int, refused: bool) -> None:
    variables = {"SLURM_JOB_GPUS": given, "CUDA_VISIBLE_DEVICES": visible}
    if refused:
        with pytest.raises(
            LaunchError, match="CUDA_VISIBLE_DEVICES is 0,1,2,3, but Slurm gave this job the devices 4,5"
        ):
            check_visible_devices(variables, of_machine)
    else:
        check_visible_devices(variables, of_machine)


@pytest.mark.parametrize("nodes", [2, 3, 32, 33, 100, 1000])
def test_every_node_is_tried_from_others_and_none_from_too_many(nodes: int) -> None:
    tried = [partners(number, nodes) for number in range(nodes)]
    assert all(number not in others for number, others in enumerate(tried))
    assert {other for others in tried for other in others} == set(range(nodes))
    assert max(map(len, tried)) <= 31


# ---- meeting


def meet_all(size: int, port: int, *ranks: int) -> list[Any]:
    """The outcome of `meet` in a thread a rank, each as on a node of its own."""

    def one(rank: int) -> Any:
        try:
            return meet(Environment(rank, 0, size, "127.0.0.1", port, "torch"))
        except PreflightError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


def test_processes_meet() -> None:
    assert not any(isinstance(store, Exception) for store in meet_all(3, free_port(), 0, 1, 2))
    assert not any(thread.name == "preflight" and _lives_on(thread) for thread in threading.enumerate())


def _lives_on(thread: threading.Thread) -> bool:
    thread.join(2.0)
    return thread.is_alive()


def test_who_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "MEETING_SECONDS", 1.0)
    monkeypatch.setattr(meeting, "ANSWER_SECONDS", 0.5)
    first, second = meet_all(4, free_port(), 0, 2)
    assert str(first) == str(second) == "2 of 4 processes did not come in 1 s: 1, 3"


def test_a_rank_0_that_does_not_come_is_not_waited_for_for_ever() -> None:
    with pytest.raises(PreflightError, match=r"cannot reach rank 0 at 127.0.0.1:\d+ after \d s") as caught:
        meet(Environment(1, 0, 2, "127.0.0.1", free_port(), "torch"), seconds=1.0)
    assert caught.value.alone


def test_a_pair_that_cannot_connect_is_named_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = free_port()
    node = meeting.Node
    monkeypatch.setattr(
        meeting,
        "Node",
        lambda rank, host, address, port: node(rank, f"host{rank}", address, closed if rank == 2 else port),
    )
    began = time.monotonic()
    outcomes = meet_all(3, free_port(), 0, 1, 2)
    assert time.monotonic() - began < 10
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert str(outcomes[0]).startswith("the network is broken: ")
    assert f"cannot reach host2 at 127.0.0.1:{closed} ([Errno 111] Connection refused)" in str(outcomes[0])
    assert "host1" not in str(outcomes[0]).replace("cannot reach host2", "")


HANG = """
import time, torch.distributed as dist
from parallel.environment import Environment
from parallel.preflight import _limit
store = dist.TCPStore("127.0.0.1", {port}, is_master=True, wait_for_workers=False)
with _limit(Environment(0, 0, 2, "127.0.0.1", {port}, "torch"), "rank 0 on node1 to rank 1 on node2", 0.5):
    time.sleep(60)
"""


def test_a_network_that_carries_nothing_ends_the_process() -> None:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", HANG.format(port=free_port())],
        capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": str(Path.cwd())},
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "error: the network does not carry rank 0 on node1 to rank 1 on node2: nothing arrived for 0 s"
    )
    assert time.monotonic() - began < 60
