"""B13 and loss spikes: what is not applied is applied nowhere, is said and counted, and ends a run that goes on so."""

import math
from pathlib import Path

import pytest
import torch

from tests.faults.runs import exact, records, run, run_all, start, status, steps_saved
from training.checkpoint import Checkpoint, read

PLAIN = ["training.steps=10", "training.eval_every=10", "model.dropout=0.0"]
EACH = [*PLAIN, "checkpoint.every=1"]
ENGINES = {
    "pipeline": ["parallel.pipeline=2"],
    "zero0": ["parallel.zero_stage=0"],
    "zero1-bf16": ["precision.dtype=bf16"],
    "zero2": ["parallel.zero_stage=2"],
    "zero3": ["parallel.zero_stage=3"],
}
SPIKES = ["training.spike_window=4", "training.spike_threshold=20"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs of this file that end well, made by one pair of processes."""
    folder = tmp_path_factory.mktemp("bad")
    runs = [("clean", [*PLAIN, *ENGINES["pipeline"]], [])]
    for name, overrides in ENGINES.items():
        runs.append((f"inf-{name}", [*EACH, *overrides], [["infinite_gradient", [1, [3, 6]]]]))
        runs.append((f"skip-{name}", [*EACH, *overrides, *SPIKES, "training.on_spike=skip"], [["spike", [[24]]]]))
    pipeline = [*PLAIN, *ENGINES["pipeline"], *SPIKES]
    runs += [
        ("warn", [*pipeline, "training.on_spike=warn"], [["spike", [[24]]]]),
        ("rewind", [*pipeline, "checkpoint.every=3", "training.on_spike=rewind"], [["spike", [[28]]]]),
        # The same in three starts: before the spike, over it, after it. The window of losses is resumed too.
        ("resumed", [*pipeline, "checkpoint.every=3", "training.on_spike=rewind", "training.stop_after=6"], []),
        ("resumed", [*pipeline, "training.on_spike=rewind", "training.stop_after=7"], [["spike", [[28]]]]),
        ("resumed", [*pipeline, "checkpoint.every=3", "training.on_spike=rewind"], [["spike", [[28]]]]),
        ("nowhere", [*pipeline, "checkpoint.every=null", "training.on_spike=rewind"], [["spike", [[24]]]]),
    ]
    folder.joinpath("log").write_text(run_all(folder, runs))
    return folder


def tensors(run: Path, step: int) -> dict[tuple[str, str], torch.Tensor]:
    checkpoint = Checkpoint.open(run / "checkpoints" / f"step_{step:08d}")
    return {(name, kind): checkpoint.read(name, kind) for name in checkpoint.names() for kind in checkpoint.kinds()}


def same(run: Path, one: int, other: int) -> bool:
    first, second = tensors(run, one), tensors(run, other)
    return all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_infinite_gradient_in_one_rank_is_skipped_in_all(folder: Path, engine: str) -> None:
    run = folder / f"inf-{engine}"
    assert [record["step"] for record in records(run) if record["skipped"]] == [3, 6]
    assert [record["skipped_steps"] for record in records(run)] == [0, 0, 1, 1, 1, 2, 2, 2, 2, 2]
    # Weights and moments are those of the step before; afterwards they move on, with Adam's own count one less.
    assert same(run, 2, 3) and same(run, 5, 6) and not same(run, 3, 4)
    manifest = Checkpoint.open(run / "checkpoints" / "step_00000010").manifest
    assert (manifest.adam_step, manifest.step, manifest.samples) == (8, 10, 40)
    assert manifest.counters["skipped"] == 2 and manifest.counters["skipped_in_a_row"] == 0
    text = (folder / "log").read_text()
    assert text.count("step 6 was skipped: a loss or gradient is not finite (2 so far, 1 in a row)") == len(ENGINES)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_update_of_a_spike_is_made_nowhere(folder: Path, engine: str) -> None:
    """The sixth step hands in sample 24's loss: step 7. It is known before the update."""
    run = folder / f"skip-{engine}"
    assert [record["step"] for record in records(run) if record["skipped"]] == [7]
    assert same(run, 6, 7) and not same(run, 7, 8)
    assert [record["spikes"] for record in records(run)] == [0] * 6 + [1] * 4
    assert 50 < records(run)[6]["loss"] < 60
    text = (folder / "log").read_text()
    assert "step 7 was skipped: loss 5" in text and "standard deviations above the mean" in text


def test_a_warning_changes_nothing(folder: Path) -> None:
    run = folder / "warn"
    assert "warning: step 7: loss 5" in (folder / "log").read_text()
    losses, clean = records(run), records(folder / "clean")
    assert [record["grad_norm"] for record in losses] == [record["grad_norm"] for record in clean]
    assert [record["spikes"] for record in losses] == [0] * 6 + [1] * 4
    assert all(torch.equal(tensors(run, 10)[key], value) for key, value in tensors(folder / "clean", 10).items())


@pytest.mark.parametrize(("name", "back"), [("rewind", 6), ("resumed", 7)])
def test_a_rewind_passes_over_the_samples_since_the_checkpoint(folder: Path, name: str, back: int) -> None:
    """Saved after 6 steps; step 8, samples 28 to 31, is the spike: back to 6, on with sample 32.

    The resumed run was also saved where it was stopped, after step 7, and so goes back to there.
    """
    run, first = folder / name, 4 * back
    assert [record["step"] for record in records(run)] == list(range(1, 11))
    manifest = Checkpoint.open(run / "checkpoints" / "step_00000010").manifest
    assert manifest.passed_over == [[first, 32]]
    assert manifest.samples == 32 + 4 * (10 - back) and manifest.tokens == 40 * 32
    assert manifest.counters["spikes"] == 1 and manifest.adam_step == 10
    # The checkpoint that it went back to knows it, so that a start from there does not meet the spike again.
    assert Checkpoint.open(run / "checkpoints" / f"step_{back:08d}").manifest.passed_over == [[first, 32]]
    clean = exact(folder / "clean")
    assert exact(run)[:back] == clean[:back] and exact(run)[back:] != clean[back:]
    assert f"back to step {back}, passing over samples {first} to 31" in (folder / "log").read_text()


def test_a_rewind_without_a_checkpoint_skips_the_step(folder: Path) -> None:
    run = folder / "nowhere"
    assert [record["step"] for record in records(run) if record["skipped"]] == [7]
    assert "and there is no checkpoint to go back to" in (folder / "log").read_text()
    assert len(read(run)) > 0


def test_a_run_that_skips_on_and_on_fails_with_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "endless"
    started = start(
        folder,
        "training.skipped_in_a_row=3",
        "checkpoint.every=2",
        faults=[("infinite_gradient", [1, list(range(5, 25))])],
    )
    assert started.wait() == [1, 1]
    sentence = (
        "3 steps in a row (to step 7) were skipped because a loss or gradient was not finite: "
        "the weights are those of the step before them"
    )
    assert status(folder)["state"] == "failed" and status(folder)["reason"] == sentence
    assert status(folder)["first_failing_rank"] is None
    assert started.text().splitlines()[-1] == f"error: {sentence}" and "Traceback" not in started.text()
    assert [record["skipped"] for record in records(folder)] == [False] * 4 + [True] * 3
    assert all(record["grad_norm"] is None or math.isfinite(record["grad_norm"]) for record in records(folder))


def test_a_held_out_loss_that_is_not_a_number_does_not_hinder_a_checkpoint(tmp_path: Path) -> None:
    overrides = ("training.steps=2", "training.eval_every=1", "checkpoint.every=1", "optimizer.learning_rate=1e20")
    text = run(tmp_path / "far", *overrides, "optimizer.warmup_steps=0", processes=1)
    assert "validation/loss nan" in text
    assert [record["validation_loss"] for record in records(tmp_path / "far", "validation")] == [None, None]
    assert steps_saved(tmp_path / "far") == [1, 2]
