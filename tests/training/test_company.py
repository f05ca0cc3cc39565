"""How ranks hear of each other: what a rank does when the store does not answer."""

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection

import pytest
import torch.distributed as dist

from training.company import ANSWER_SECONDS, Company
from training.failure import Failure


def _hold_a_store(connection: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection.send(store.port)
    connection.recv()


@pytest.fixture
def holder() -> tuple[int, int]:
    """Process number and port of a store."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_hold_a_store, args=(theirs,), daemon=True)
    process.start()
    yield process.pid, ours.recv()
    process.kill()
    process.join()


def test_the_first_failure_that_is_posted_is_everyone_s(holder: tuple[int, int]) -> None:
    one, other = (Company(rank, 2, "127.0.0.1", holder[1]) for rank in (0, 1))
    assert one.post(Failure(0, "the disk is gone", 0)).reason == "the disk is gone"
    assert other.post(Failure(1, "lost its partner", 1)).reason == "the disk is gone"
    assert not one.lost and not other.lost


def test_a_rank_without_a_network_does_not_wait_for_an_answer(holder: tuple[int, int]) -> None:
    company = Company(1, 2, "127.0.0.1", holder[1])
    # As where packets are dropped: the connection stands, and nothing comes.
    os.kill(holder[0], signal.SIGSTOP)
    began = time.monotonic()
    assert company.post(Failure(1, "a newer attempt", 1)).reason == "a newer attempt"
    assert company.lost and time.monotonic() - began < ANSWER_SECONDS + 2
