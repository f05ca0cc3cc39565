"""Training as a person starts it: a run, its stop and resumption, in the same layout and in others.

The uninterrupted run on one process is the reference. Bounds are those of docs/parity.md: loss 1e-5, norm 2e-5 over
20 steps.
"""

import json
import shutil
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.launcher.commands import exact, largest_difference, metrics, train
from training.checkpoint import read

CONFIGURATION = "configs/parity.yaml"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the runs of this module."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def straight(runs: Path) -> Path:
    """All 20 steps at once, on one process."""
    result = train(1, CONFIGURATION, f"run.output_dir={runs / 'straight'}", launcher="python")
    assert result.status == 0, result.error
    return runs / "straight"


@pytest.fixture(scope="module")
def stopped(runs: Path) -> Path:
    """Stopped after step 7, on one process."""
    result = train(1, CONFIGURATION, f"run.output_dir={runs / 'stopped'}", "training.stop_after=7", launcher="python")
    assert result.status == 0, result.error
    return runs / "stopped"


def scalars(run_dir: Path, tag: str) -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def test_a_run_leaves_what_the_readme_says(straight: Path) -> None:
    lines = metrics(straight)
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert lines[-1]["tokens"] == 20 * 16 * 64
    assert lines[0]["learning_rate"] == pytest.approx(1e-3 / 5) and lines[-1]["learning_rate"] == 1e-3
    assert lines[0]["mfu"] is None or lines[0]["mfu"] > 0
    assert all(line["clip_coefficient"] == pytest.approx(min(1, 1 / line["grad_norm"]), rel=1e-5) for line in lines)
    (validation,) = metrics(straight, "validation")
    assert validation["step"] == 20 and 0 < validation["validation_bits_per_byte"] < 8
    status = json.loads((straight / "status.json").read_text())
    assert (status["state"], status["step"], status["attempt"]) == ("finished", 20, 1)
    assert (straight / "config.yaml").exists()
    assert (straight / "checkpoints/latest").read_text().strip() == "step_00000020"
    assert scalars(straight, "train/loss") == [(line["step"], pytest.approx(line["loss"], rel=1e-6)) for line in lines]


def test_stopped_and_started_again_it_is_the_uninterrupted_run_bit_for_bit(
    straight: Path, stopped: Path, runs: Path
) -> None:
    status = json.loads((stopped / "status.json").read_text())
    assert (status["state"], status["step"]) == ("stopped", 7)
    again = runs / "again"
    shutil.copytree(stopped, again)
    result = train(1, CONFIGURATION, f"run.output_dir={again}", launcher="python")
    assert result.status == 0, result.error
    assert exact(metrics(again)) == exact(metrics(straight))
    assert scalars(again, "train/loss") == scalars(straight, "train/loss")
    ours, reference = read(again), read(straight)
    assert set(ours) == set(reference)
    assert all((ours[name] == reference[name]).all() for name in reference)


@pytest.mark.parametrize(("pipeline", "tensor", "launcher"), [(2, 1, "deepspeed"), (1, 2, "torchrun")])
def test_started_again_on_another_layout_it_agrees_within_the_bounds(
    straight: Path, stopped: Path, runs: Path, pipeline: int, tensor: int, launcher: str
) -> None:
    again = runs / f"again-{pipeline}-{tensor}"
    shutil.copytree(stopped, again)
    layout = f"parallel.pipeline={pipeline}", f"parallel.tensor={tensor}"
    result = train(pipeline * tensor, CONFIGURATION, f"run.output_dir={again}", *layout, launcher=launcher)
    assert result.status == 0, result.error
    assert largest_difference(metrics(again), metrics(straight), "loss") < 1e-5
    assert largest_difference(metrics(again), metrics(straight), "grad_norm") < 2e-5
    assert json.loads((again / "status.json").read_text())["attempt"] == 2


def test_eight_processes_under_the_deepspeed_command_agree_with_one(straight: Path, runs: Path) -> None:
    """pipeline 2 x tensor 2, so data becomes 2."""
    layout = "parallel.pipeline=2", "parallel.tensor=2", "batch.micro_batch_size=4", "training.stop_after=4"
    result = train(8, CONFIGURATION, f"run.output_dir={runs / 'eight'}", *layout)
    assert result.status == 0, result.error
    assert largest_difference(metrics(runs / "eight"), metrics(straight)[:4], "loss") < 1e-6
    assert largest_difference(metrics(runs / "eight"), metrics(straight)[:4], "grad_norm") < 2e-6


def test_a_finished_run_started_again_says_so_and_changes_nothing(straight: Path) -> None:
    before = metrics(straight)
    result = train(1, CONFIGURATION, f"run.output_dir={straight}", launcher="python")
    assert result.status == 0
    assert "finished" in result.output
    assert metrics(straight) == before
