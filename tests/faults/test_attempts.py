"""Two attempts on one run folder at once: the older one writes nothing more and leaves."""

import time
from pathlib import Path

from tests.faults.runs import exact, records, run, start, status, steps_saved


def test_the_older_attempt_leaves(tmp_path: Path) -> None:
    """The old one's node was cut off: it still trains, and still sees the run folder."""
    folder = tmp_path / "run"
    old = start(
        folder, "training.steps=60", "training.eval_every=60", faults=[("pace", [0.4]), ("slow_writer", [0.05])]
    )
    old.wait_for("step 6/60")
    old_log = old.log.rename(tmp_path / "old.log")
    old.log = old_log
    new = start(folder, "training.steps=60", "training.eval_every=60")
    assert new.wait() == [0, 0]
    assert old.wait(30.0) == [1, 1]
    began = time.monotonic()
    assert old.text().splitlines()[-1] == f"error: a newer attempt has taken {folder} over", old.text()[-2000:]
    assert time.monotonic() - began < 60.0
    found = status(folder)
    assert (found["state"], found["attempt"], found["step"]) == ("finished", 2, 60)
    assert [record["step"] for record in records(folder)] == list(range(1, 61))
    assert steps_saved(folder)[-1] == 60
    run(tmp_path / "straight", "training.steps=60", "training.eval_every=60")
    assert exact(folder) == exact(tmp_path / "straight")
