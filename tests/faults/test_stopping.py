"""Signals to one rank or all, the file STOP, the time limit, the end of a launcher: saved once, left together."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.faults.runs import (
    Started,
    exact,
    records,
    run,
    run_all,
    start,
    status,
    steps_saved,
    validations,
)
from training.status import read_status

PIPELINE = ["parallel.pipeline=2"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run, and one that was asked to stop in five ways."""
    folder = tmp_path_factory.mktemp("stopping")
    chain = folder / "chain"
    folder.joinpath("log").write_text(
        run_all(
            folder,
            [
                ("straight", PIPELINE, []),
                ("chain", PIPELINE, [["send", [{"3": [1, "SIGTERM"]}]]]),
                ("chain", PIPELINE, [["send", [{"6": [0, "SIGUSR1"]}]]]),
                ("chain", PIPELINE, [["send", [{"9": [-1, "SIGINT"]}]]]),
                ("chain", PIPELINE, [["touch", [str(chain / "STOP"), 11]]]),
                ("chain", [*PIPELINE, "training.max_minutes=0.02"], [["pace", [0.4]]]),
                ("chain", PIPELINE, [["send", [{"24": [1, "SIGTERM"]}]]]),
                ("chain", PIPELINE, []),
            ],
        )
    )
    return folder / "straight"


def test_each_request_stops_all_ranks_after_the_step_that_it_fell_into(straight: Path) -> None:
    text = (straight.parent / "log").read_text()
    for line in (
        "stopped after step 3 of 24 (signal SIGTERM)",
        "stopped after step 6 of 24 (signal SIGUSR1)",
        "stopped after step 9 of 24 (signal SIGINT)",
        "stopped after step 11 of 24 (the file STOP in the run's folder)",
        " of 24 (training.max_minutes are over)",
        "stopped after step 24 of 24 (signal SIGTERM)",
        f"finished after step 24 of 24: {straight.parent / 'chain'}",
    ):
        assert text.count(line) == 1, line
    assert not (straight.parent / "chain" / "STOP").exists()


def test_the_union_of_the_stopped_runs_is_the_uninterrupted_run(straight: Path) -> None:
    """Also the evaluations: those of steps 6 and 24, at which a stop came first, were made up for."""
    chain = straight.parent / "chain"
    assert exact(chain) == exact(straight) and len(exact(chain)) == 24
    assert validations(chain) == validations(straight)
    assert [step for step, _ in validations(chain)] == [6, 12, 18, 24]
    assert {3, 6, 9, 11, 24} <= set(steps_saved(chain))
    assert status(chain)["state"] == "finished" and status(chain)["attempt"] == 7


def launcher_of(started: Started, name: str) -> psutil.Process:
    """The `deepspeed` command, or the launch.py that it starts."""
    runner = psutil.Process(started.processes[0].pid)
    if name == "deepspeed":
        return runner
    return next(p for p in runner.children() if "deepspeed.launcher.launch" in p.cmdline())


@pytest.mark.parametrize(
    ("which", "number"),
    [("launch.py", signal.SIGKILL), ("deepspeed", signal.SIGKILL), ("launch.py", signal.SIGTERM)],
    ids=["launch.py-killed", "deepspeed-killed", "launch.py-terminated"],
)
def test_the_end_of_a_launcher_stops_the_run(straight: Path, which: str, number: int) -> None:
    """DeepSpeed's commands leave the ranks alone, or end them with little ado; the ranks notice, save and leave."""
    folder = straight.parent / f"{which}-{number}"
    started = start(folder, *PIPELINE, faults=[("pace", [0.3])], deepspeed=True)
    started.wait_for("step 5/24")
    os.kill(launcher_of(started, which).pid, number)
    assert started.wait_until_gone(30.0) < 20.0
    started.wait(30.0)
    reason = "signal SIGTERM" if number == signal.SIGTERM else "the launcher of the processes has ended"
    found = status(folder)
    assert (found["state"], found["reason"], found["first_failing_rank"]) == ("stopped", reason, None)
    assert found["step"] in steps_saved(folder)
    run(folder, *PIPELINE)
    assert exact(folder) == exact(straight) and validations(folder) == validations(straight)


def test_a_step_that_does_not_end_within_the_grace_time(straight: Path) -> None:
    """The rank that was asked writes its stacks and leaves, the other one with it; the exit status says so."""
    folder = straight.parent / "grace"
    started = start(folder, *PIPELINE, "training.grace_seconds=2", faults=[("sleep_in_loader", [1, 5, 600])])
    started.wait_for("step 4/24")
    time.sleep(0.5)
    began = time.monotonic()
    started.processes[0].send_signal(signal.SIGTERM)
    assert started.wait() == [1, 1]
    assert time.monotonic() - began < 20.0
    assert status(folder)["state"] == "failed" and status(folder)["first_failing_rank"] == 0
    assert "asked to stop (signal SIGTERM), but no step ended within 2 s" in status(folder)["reason"]
    stacks = (folder / "grace" / "rank_00000.txt").read_text()
    assert "steps finished: 4" in stacks and "thread MainThread:" in stacks and "train_step" in stacks
    # The save of step 4 was under way: it is there where all ranks had met often enough to publish it.
    assert len(records(folder)) == 4 and steps_saved(folder) in ([], [4])


def test_before_the_run_begins_a_signal_ends_it_at_once(straight: Path) -> None:
    """There is nothing to save, and nobody to agree with: the other rank would be waited for for half an hour."""
    folder = straight.parent / "early"
    started = start(folder, processes=2)
    until = time.monotonic() + 30.0
    while time.monotonic() < until and not started.text():
        with open(f"/proc/{started.processes[0].pid}/status") as file:
            caught = next(line for line in file if line.startswith("SigCgt"))
        if int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1:  # its handler is set
            break
        time.sleep(0.02)
    for process in started.processes:
        process.send_signal(signal.SIGTERM)
    assert all(status != 0 for status in started.wait(15.0))
    assert "stopped before the run began: signal SIGTERM" in started.text()
    assert read_status(folder) is None
