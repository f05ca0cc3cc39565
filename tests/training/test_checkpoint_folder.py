"""Publishing, choosing and pruning checkpoints: at no moment is a sound one missing, and only its own go."""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from training import checkpoint
from training.checkpoint import Checkpoint, CheckpointError, Manifest, Piece

GAIN = torch.arange(4096.0)


def save(folder: Path, step: int, run_id: str = "run", attempt: int = 1, value: torch.Tensor = GAIN) -> Path:
    partial = checkpoint.partial_folder(folder, step, attempt)
    shape = tuple(value.shape)
    file = checkpoint.write_rank_file(partial, 0, [Piece("gain", "weight", shape, ((0, shape[0]),), 0, value)])
    return checkpoint.publish(folder, partial, Manifest(run_id=run_id, step=step, attempt=attempt), [file])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_publish_leaves_nothing_but_the_checkpoint_and_latest(tmp_path: Path) -> None:
    save(tmp_path, 100)
    save(tmp_path, 100, value=GAIN + 1)
    assert names(tmp_path) == ["latest", "step_00000100"]
    assert (tmp_path / "latest").read_text() == "step_00000100\n"
    assert torch.equal(Checkpoint.open(tmp_path / "step_00000100").read("gain"), GAIN + 1)


@pytest.mark.parametrize("moment", range(12))
def test_an_exception_at_any_file_operation_leaves_a_sound_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """The n-th rename, sync or removal fails while step 100 is saved again; what is there then must be sound."""
    save(tmp_path, 100)
    count = 0

    def failing(real):  # type: ignore[no-untyped-def]
        def call(*arguments, **options):  # type: ignore[no-untyped-def]
            nonlocal count
            count += 1
            if count > moment:
                raise OSError("the file system went away")
            return real(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(os.fsync))
        patch.setattr(Path, "rename", failing(Path.rename))
        patch.setattr(Path, "replace", failing(Path.replace))
        patch.setattr(checkpoint.shutil, "rmtree", failing(checkpoint.shutil.rmtree))
        try:
            save(tmp_path, 100, attempt=2, value=GAIN + 1)
            done = True
        except OSError:
            done = False
    assert done == (moment >= 11)  # the count above reaches past the last operation
    found, _ = checkpoint.newest_sound(tmp_path)
    assert found is not None
    gain = Checkpoint.open(found).read("gain")
    assert torch.equal(gain, GAIN) or torch.equal(gain, GAIN + 1)
    checkpoint.remove_leftovers(tmp_path, attempt=3)
    assert checkpoint.newest_sound(tmp_path)[0] == found


def _save_for_ever(folder: Path) -> None:
    for step in range(1, 10**6):
        save(folder, step % 3 + 1, attempt=step, value=GAIN + step)
        checkpoint.prune(folder, keep=2, run_id="run")


def test_sigkill_at_random_moments_leaves_a_sound_one(tmp_path: Path) -> None:
    save(tmp_path, 1, attempt=0)
    chance = random.Random(7)
    context = multiprocessing.get_context("fork")
    for _ in range(20):
        process = context.Process(target=_save_for_ever, args=(tmp_path,))
        process.start()
        time.sleep(0.02 + 0.05 * chance.random())
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        found, reports = checkpoint.newest_sound(tmp_path)
        assert found is not None
        assert all("incomplete: a save was cut off" in report for report in reports), reports
        gain = Checkpoint.open(found).read("gain")
        assert torch.equal(gain - gain[0], GAIN)
        checkpoint.remove_leftovers(tmp_path, attempt=10**9)


def test_a_save_that_was_cut_off_is_reported_by_name(tmp_path: Path) -> None:
    save(tmp_path, 90)
    checkpoint.write_rank_file(tmp_path / ".step_00000100.partial-1", 0, [])
    found, reports = checkpoint.newest_sound(tmp_path)
    assert found == tmp_path / "step_00000090"
    assert reports == [f"{tmp_path}/.step_00000100.partial-1 is incomplete: a save was cut off there"]


def test_an_attempt_that_is_no_longer_the_newest_publishes_nothing(tmp_path: Path) -> None:
    partial = tmp_path / ".step_00000100.partial-1"
    file = checkpoint.write_rank_file(partial, 0, [Piece("gain", "weight", (4096,), ((0, 4096),), 0, GAIN)])
    with pytest.raises(CheckpointError, match="a newer attempt owns this run"):
        checkpoint.publish(tmp_path, partial, Manifest(run_id="run", step=100), [file], still_current=lambda: False)
    assert checkpoint.steps(tmp_path) == []


@pytest.mark.parametrize("keep,left", [(1, [10100]), (2, [10000, 10100]), (5, [9900, 10000, 10100])])
def test_prune_counts_steps_as_numbers_and_spares_other_runs(tmp_path: Path, keep: int, left: list[int]) -> None:
    save(tmp_path, 99999, run_id="another")
    save(tmp_path, 123456789, run_id="another")  # nine digits: as text it comes before step_00009900's kin
    for step in (9900, 10000, 10100):
        save(tmp_path, step)
    checkpoint.prune(tmp_path, keep, "run")
    assert [step for step, _ in checkpoint.steps(tmp_path)] == [*left, 99999, 123456789]
    assert checkpoint.newest_sound(tmp_path, run_id="run")[0] == tmp_path / "step_00010100"


def test_prune_keeps_what_was_published_last_though_a_damaged_later_step_is_there(tmp_path: Path) -> None:
    """Attempt 1 left step 200 with a flipped byte; attempt 2 went on from 100 and saved 150; keep is 1."""
    save(tmp_path, 100)
    damaged = save(tmp_path, 200) / "rank_00000.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    save(tmp_path, 150, attempt=2)
    checkpoint.prune(tmp_path, 1, "run")
    assert [step for step, _ in checkpoint.steps(tmp_path)] == [150]


def test_what_was_published_last_is_the_newest_after_a_rewind_within_an_attempt(tmp_path: Path) -> None:
    """At a loss spike the run went back from 300 to 100 and has saved 200 since; then it is killed."""
    for step in (100, 300, 200):
        save(tmp_path, step)
    assert checkpoint.newest_sound(tmp_path)[0] == tmp_path / "step_00000200"
    checkpoint.prune(tmp_path, 1, "run")
    assert [step for step, _ in checkpoint.steps(tmp_path)] == [200]


def test_prune_leaves_what_it_cannot_read(tmp_path: Path) -> None:
    unreadable = save(tmp_path, 50)
    (unreadable / "manifest.json").unlink()
    for step in (100, 200):
        save(tmp_path, step)
    assert checkpoint.prune(tmp_path, 1, "run") == [tmp_path / "step_00000100"]
    assert [step for step, _ in checkpoint.steps(tmp_path)] == [50, 200]


def test_find_takes_a_run_a_folder_of_checkpoints_or_a_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path / "run" / "checkpoints", 100)
    for given in (tmp_path / "run", tmp_path / "run" / "checkpoints", path):
        assert checkpoint.find(given) == path
    with pytest.raises(CheckpointError, match="neither a checkpoint nor a run that holds a sound one"):
        checkpoint.find(tmp_path)
    with pytest.raises(CheckpointError, match="is no folder"):
        checkpoint.find(tmp_path / "nothing")
