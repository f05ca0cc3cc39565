"""A run that goes on with another number of processes, in a layout that it chooses itself."""

from pathlib import Path

import pytest

from tests.faults.runs import exact, records, run, run_all, steps_saved, validations


def test_on_half_the_processes_the_run_goes_on(tmp_path: Path) -> None:
    """Stopped on two stages, resumed on one process by the same command: within the bounds of parity, dropout on."""
    overrides = ["parallel.pipeline=2", "parallel.elastic=true"]
    run_all(tmp_path, [("straight", overrides, []), ("halved", [*overrides, "training.stop_after=8"], [])])
    text = run(tmp_path / "halved", *overrides, processes=1)
    assert "elastic: 1 processes are pipeline 1 x tensor 1 x data 1: the nearest of 1 to pipeline 2 x tensor 1" in text
    assert "at step 8" in text
    straight, halved = records(tmp_path / "straight"), records(tmp_path / "halved")
    assert exact(tmp_path / "halved")[:8] == exact(tmp_path / "straight")[:8] and len(halved) == 24
    for one, other in zip(straight, halved, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=2e-5)
        assert [one[key] for key in ("step", "tokens", "learning_rate")] == [
            other[key] for key in ("step", "tokens", "learning_rate")
        ]
    assert dict(validations(tmp_path / "halved")) == pytest.approx(dict(validations(tmp_path / "straight")), rel=1e-5)
    assert steps_saved(tmp_path / "halved")[-1] == 24
