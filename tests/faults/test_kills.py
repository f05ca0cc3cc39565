"""SIGKILL at random moments, of one rank, all ranks and each launcher: nothing is left running, nothing is lost.

One run is killed again and again in one folder. At the end its metrics are the uninterrupted run's, bit for bit. The
moments are drawn from a seed, but each of the phases that a run spends its time in is hit: a fault planted by the test
says what each rank is doing, and makes writing a checkpoint slow.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.faults.runs import Started, exact, run, start, steps_saved, validations
from training.checkpoint import newest_sound

OVERRIDES = ["parallel.pipeline=2", "training.steps=48", "training.eval_every=5", "checkpoint.every=3"]
PHASES = ("start-up", "forward", "collective", "evaluation", "save")
VICTIMS = ("one rank", "all ranks", "deepspeed", "launch.py")
COLLECTIVE = ("reducing", "agreeing", "receiving", "sending", "updating")


class Watch:
    """What the ranks of a run say they are doing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def says(self, name: str) -> str:
        try:
            return (self.folder / name).read_text()
        except FileNotFoundError:
            return ""

    def is_in(self, phase: str, rank: int) -> bool:
        doing, saving = self.says(str(rank)), self.says(f"{rank}.save")
        return {
            "start-up": doing in ("", "building the model", "restoring the checkpoint"),
            "forward": doing.startswith("forward"),
            "collective": doing.startswith(COLLECTIVE),
            "evaluation": doing.startswith("evaluating"),
            "save": saving == "saving",
        }[phase]


def wait_until(condition: Callable[[], bool], started: Started, seconds: float = 300.0) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and any(process.poll() is None for process in started.processes):
        if condition():
            return
        time.sleep(0.002)
    started.end()
    raise AssertionError(f"the moment to kill did not come:\n{started.text()[-3000:]}")


def has_ranks(started: Started) -> bool:
    return len(started.ranks()) == 2


def kill(started: Started, victim: str, draw: random.Random) -> None:
    if victim == "deepspeed":
        os.kill(started.processes[0].pid, signal.SIGKILL)
        return
    if victim == "launch.py":
        children = psutil.Process(started.processes[0].pid).children()
        next(p for p in children if "deepspeed.launcher.launch" in p.cmdline()).kill()
        return
    ranks = started.ranks()
    for process in ranks if victim == "all ranks" else [draw.choice(ranks)]:
        process.kill()


def kill_again_and_again(folder: Path, kills: int, seed: int) -> list[tuple[str, str]]:
    """Start, kill, start, ...; returns victim and phase of each kill. Each start must be left by all in a minute."""
    draw = random.Random(seed)
    phases = [PHASES[index % len(PHASES)] for index in range(kills)]
    victims = [VICTIMS[index % len(VICTIMS)] for index in range(kills)]
    draw.shuffle(phases)
    draw.shuffle(victims)
    hit = []
    for number, (phase, victim) in enumerate(zip(phases, victims, strict=True)):
        says = folder.parent / f"says-{number}"
        says.mkdir()
        watch, rank = Watch(says), draw.randrange(2)
        # Before they have met, ranks hear of each other's end from their launcher only.
        deepspeed = victim in ("deepspeed", "launch.py") or phase == "start-up"
        faults = [("announce", [str(says)]), ("slow_writer", [0.02])]
        before = newest_sound(folder / "checkpoints")[0]
        started = start(folder, *OVERRIDES, faults=faults, deepspeed=deepspeed)
        if phase == "start-up":
            wait_until(partial(has_ranks, started), started)
            time.sleep(draw.uniform(0.0, 6.0))
        else:
            time.sleep(draw.uniform(0.0, 2.0))
            wait_until(partial(watch.is_in, phase, rank), started)
        doing = watch.says(str(rank)) or "starting"
        kill(started, victim, draw)
        gone = started.wait_until_gone(60.0)
        started.wait(60.0)
        after, reports = newest_sound(folder / "checkpoints")
        print(f"kill {number}: {victim} while rank {rank} was in {phase} ({doing}); all gone after {gone:.1f} s")
        print(f"  newest checkpoint {after and after.name}; {reports}")
        # What was complete stays so, and at most what was being written is incomplete.
        assert before is None or (after is not None and after.name >= before.name)
        assert all("is incomplete: a save was cut off there" in report for report in reports)
        hit.append((victim, phase))
    return hit


@pytest.mark.parametrize(
    ("kills", "seed"),
    [
        pytest.param(10, 1, marks=pytest.mark.timeout(1800)),
        pytest.param(50, 2, marks=[pytest.mark.slow, pytest.mark.timeout(9000)]),
    ],
)
def test_a_run_killed_at_random_moments_loses_nothing(tmp_path: Path, kills: int, seed: int) -> None:
    folder, straight = tmp_path / "killed", tmp_path / "straight"
    hit = kill_again_and_again(folder, kills, seed)
    assert {phase for _, phase in hit} == set(PHASES) and {victim for victim, _ in hit} == set(VICTIMS)
    text = run(folder, *OVERRIDES)
    assert "resuming" in text and "finished after step 48 of 48" in text
    run(straight, *OVERRIDES)
    assert exact(folder) == exact(straight) and [record[0] for record in exact(folder)] == list(range(1, 49))
    assert validations(folder) == validations(straight)
    assert steps_saved(folder)[-1] == 48
    # Nothing half written or half deleted is left either.
    assert not [path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith(".step")]
