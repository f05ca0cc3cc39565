"""Saving does not stop training, and a file system that fails stops neither it nor the older checkpoints."""

import os
import shutil
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.runs import exact, records, run, run_all, start, status, steps_saved
from training.checkpoint import newest_sound

# 20 MB hold three checkpoints of this model (12 bytes a parameter, 5.2 MB) and no fourth.
LARGER = [
    "model.hidden_size=96", "model.ffn_hidden_size=768", "model.num_layers=2",
    "checkpoint.every=3",
]  # fmt: skip


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 20 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a 20 MB tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_fills_up_and_is_freed_again(small_disk: Path) -> None:
    """E8: a warning, a try again, a count; the checkpoints that are there stay sound, and no metric is lost."""
    folder = small_disk / "run"
    overrides = [*LARGER, "training.steps=24", "training.eval_every=24"]
    log = small_disk.parent / "run.log"
    started = start(folder, *overrides, processes=1, faults=[("pace", [0.4])], log=log)
    started.wait_for("step 13/24")
    newest, reports = newest_sound(folder / "checkpoints")
    assert newest is not None and newest.name == "step_00000009" and not reports
    text = started.text()
    assert "warning: step 12 could not be saved: " in text and "GiB free, and a checkpoint takes 0.00" in text
    # Full to the last byte: metrics wait in memory.
    filler = os.open(small_disk / "filler", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError, match="No space left on device"):
        while True:
            os.write(filler, b"x" * 4096)
    os.close(filler)
    started.wait_for("metrics.jsonl cannot be written: No space left on device")
    started.wait_for("step 17/24")
    (small_disk / "filler").unlink()
    for step in (3, 6):
        shutil.rmtree(folder / "checkpoints" / f"step_{step:08d}")
    assert started.wait() == [0], started.text()[-3000:]
    assert "metrics.jsonl can be written again, and nothing of it is lost" in started.text()
    assert [record["step"] for record in records(folder)] == list(range(1, 25))
    assert max(record["checkpoint_failures"] for record in records(folder)) >= 2
    assert 9 in steps_saved(folder) and status(folder)["state"] == "finished" and steps_saved(folder)[-1] == 24
    assert newest_sound(folder / "checkpoints")[1] == []


def test_a_last_step_that_cannot_be_saved_is_a_failure(small_disk: Path) -> None:
    """The warning came before step 1 already."""
    folder = small_disk / "run"
    (small_disk / "filler").write_bytes(b"x" * 17 * 10**6)
    overrides = [*LARGER, "training.steps=4", "training.eval_every=4"]
    started = start(folder, *overrides, processes=1, log=small_disk.parent / "run.log")
    assert started.wait() == [1]
    text = started.text()
    assert text.index("GiB free, and a checkpoint takes") < text.index("step 1/4")
    assert "error: step 4 is trained but could not be saved: " in text.splitlines()[-1]
    assert status(folder)["reason"].startswith("step 4 is trained but could not be saved: ")
    assert len(records(folder)) == 4


def test_a_read_only_folder(small_disk: Path) -> None:
    """The checkpoints' folder turns read-only for a while."""
    folder, elsewhere = small_disk.parent / "run", small_disk / "checkpoints"
    elsewhere.mkdir()
    folder.mkdir()
    (folder / "checkpoints").symlink_to(elsewhere)
    started = start(folder, "training.steps=20", "training.eval_every=20", processes=1, faults=[("pace", [0.3])])
    started.wait_for("step 5/20")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    started.wait_for("warning: step 8 could not be saved: ")
    assert "Read-only file system" in started.text()
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert started.wait() == [0]
    assert steps_saved(folder)[0] == 4 and 8 not in steps_saved(folder) and 20 in steps_saved(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saving")
    pipeline = ["parallel.pipeline=2"]
    slow = [["slow_writer", [0.04]], ["pace", [0.25]]]
    folder.joinpath("log").write_text(
        run_all(
            folder,
            [
                ("plain", pipeline, []),
                ("slow", [*pipeline, "checkpoint.every=6"], slow),
                ("waiting", [*pipeline, "checkpoint.asynchronous=false", "checkpoint.every=6"], slow),
                ("failing", pipeline, [["failing_writer", [2]]]),
                ("keep", [*pipeline, "checkpoint.every=2", "checkpoint.keep=3"], []),
            ],
        )
    )
    return folder


def test_training_goes_on_while_a_slow_file_system_takes_a_checkpoint(folder: Path) -> None:
    """Writing lasts over a second; what training waits is a few milliseconds. Written while it waits, all of it."""
    stalls = [record["checkpoint_stall_seconds"] for record in records(folder / "slow")]
    assert max(stalls) < 0.5 and steps_saved(folder / "slow") == [6, 12, 18, 24]
    waited = [record["checkpoint_stall_seconds"] for record in records(folder / "waiting")]
    assert max(waited) > 0.8
    assert exact(folder / "slow") == exact(folder / "plain") == exact(folder / "waiting")


def test_a_save_that_fails_is_tried_again(folder: Path) -> None:
    """Steps 4 and the next try fail on one rank, then all goes well; the step after is the try."""
    run_dir, text = folder / "failing", (folder / "log").read_text()
    assert "warning: step 4 could not be saved: " in text and "Input/output error; trying again at step" in text
    failures = [record["checkpoint_failures"] for record in records(run_dir)]
    assert failures[0] == 0 and failures[-1] == 2
    assert 4 not in steps_saved(run_dir) and steps_saved(run_dir)[-1] == 24 and len(steps_saved(run_dir)) >= 4
    assert exact(run_dir) == exact(folder / "plain")
    assert newest_sound(run_dir / "checkpoints")[1] == []


def test_the_newest_are_kept(folder: Path) -> None:
    assert steps_saved(folder / "keep") == [20, 22, 24]
    assert (folder / "keep" / "checkpoints" / "latest").read_text() == "step_00000024\n"


def test_the_demos_model_waits_less_than_a_step_for_a_checkpoint(tmp_path: Path) -> None:
    """Issue's bound, at the size of configs/tiny.yaml: 4.2 million parameters, 50 MB a checkpoint."""
    model = "{hidden_size: 256, num_layers: 4, num_heads: 4, tie_embeddings: true, vocab_size: 4096}"
    overrides = [
        f"model={model}", "batch.sequence_length=256", "batch.micro_batch_size=2", "batch.global_batch_size=16",
        "parallel.pipeline=2", "training.steps=8", "training.eval_every=8", "checkpoint.every=3",
    ]  # fmt: skip
    if not os.environ.get("CI") and os.getloadavg()[0] > 8:
        pytest.skip("times mean nothing while the machine is so busy")
    folder = tmp_path / "demo"
    run(folder, *overrides)
    step = statistics.median(record["step_seconds"] for record in records(folder))
    stalls = [record["checkpoint_stall_seconds"] for record in records(folder)]
    assert sum(stall > 0 for stall in stalls) >= 2 and max(stalls) < step, (stalls, step)
