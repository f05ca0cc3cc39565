"""A rank that hangs, one that raises and one that is killed: all leave soon, and the first cause is named."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.faults.runs import start, status
from training.watchdog import rank_behind


def test_a_rank_that_sleeps_in_its_loader_is_named(tmp_path: Path) -> None:
    """F17: rank 2 sleeps; every rank writes its step, phase and stacks, and the job ends non-zero."""
    folder = tmp_path / "hang"
    overrides = ["parallel.pipeline=3", "model.num_layers=3", "training.hang_seconds=6"]
    started = start(folder, *overrides, processes=3, faults=[("sleep_in_loader", [2, 4, 600])])
    started.wait_for("step 3/24")
    began = time.monotonic()
    assert started.wait() == [1, 1, 1]
    assert time.monotonic() - began < 35.0
    found = status(folder)
    assert (found["state"], found["first_failing_rank"], found["step"]) == ("failed", 2, 3)
    assert "no step was finished for 6 s; rank 2 is behind: step 4, waiting for data for " in found["reason"]
    assert started.text().splitlines()[-1] == f"error: {found['reason']}"
    stacks = {rank: (folder / "hang" / f"rank_{rank:05d}.txt").read_text() for rank in range(3)}
    for rank, text in stacks.items():
        assert text.startswith(f"rank {rank} of 3") and "steps finished: 3" in text and "thread MainThread:" in text
    assert "phase: waiting for data, for " in stacks[2] and "sleep_in_loader" not in stacks[0]
    assert "phase: receiving from stage 1, for " in stacks[2] or "in read" in stacks[2]
    assert "phase: receiving" in stacks[0] or "phase: sending" in stacks[0]


def test_a_forward_pass_that_hangs_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "hang"
    started = start(
        folder, "parallel.pipeline=2", "training.hang_seconds=5", faults=[("sleep_in_forward", [1, 3, 600])]
    )
    assert started.wait() == [1, 1]
    found = status(folder)
    assert found["first_failing_rank"] == 1
    assert "rank 1 is behind: step 3, forward micro-batch 2 for " in found["reason"]


def test_who_is_behind() -> None:
    def doing(step: int, moves: int, waits: bool) -> dict[str, object]:
        return {"step": step, "moves": moves, "name": "x", "seconds": 3.2, "waits": waits}

    # The one that does not wait, however far it has come.
    assert rank_behind({0: doing(4, 2, True), 1: doing(4, 9, False)}, 2) == (1, "rank 1 is behind: step 5, x for 3 s")
    # Where all wait, or none does, the one that has come least far.
    assert rank_behind({0: doing(4, 9, True), 1: doing(4, 2, True)}, 2)[0] == 1
    assert rank_behind({0: doing(3, 9, False), 1: doing(4, 2, False)}, 2)[0] == 0
    assert rank_behind({0: doing(4, 9, True)}, 2) == (1, "rank 1 is behind: it does not answer")


def failed_first(folder: Path, text: str, rank: int, reason: str) -> None:
    """status.json and the last line that a rank printed name the rank and why; what launch.py adds is its own."""
    found = status(folder)
    assert (found["state"], found["first_failing_rank"]) == ("failed", rank)
    assert found["reason"].startswith(f"rank {rank} failed first: {reason}"), found["reason"]
    own = [line for line in text.splitlines() if "[launch.py:" not in line and line.strip()]
    assert own[-1] == f"error: {found['reason']}"


@pytest.mark.parametrize("processes", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_an_exception_in_one_rank_ends_all(tmp_path: Path, processes: int) -> None:
    """F9: through the `deepspeed` command, which alone would take up to half a minute for each of the others."""
    folder, failing = tmp_path / "raise", processes - 1
    started = start(
        folder,
        "parallel.pipeline=2",
        "batch.global_batch_size=8",
        "optimizer.schedule=constant",
        processes=processes,
        faults=[("raise_at", [failing, 3])],
        deepspeed=True,
    )
    started.wait_for("ValueError: planted at step 3")
    assert started.wait_until_gone(60.0) < 60.0
    assert started.wait() == [1]
    failed_first(folder, started.text(), failing, "ValueError: planted at step 3 (step 3")
    assert f"[rank {failing}] ValueError: planted at step 3" in started.text()


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_is_named(tmp_path: Path, killed: int) -> None:
    """Rank 0 too, whose process holds the store through which ranks hear of each other."""
    folder = tmp_path / "killed"
    started = start(folder, "parallel.pipeline=2", faults=[("pace", [0.2])])
    started.wait_for("step 3/24")
    os.kill(started.processes[killed].pid, signal.SIGKILL)
    statuses = started.wait()
    assert statuses[killed] == -signal.SIGKILL and statuses[1 - killed] == 1
    failed_first(folder, started.text(), killed, "its process ended without a word: killed, or out of memory")
