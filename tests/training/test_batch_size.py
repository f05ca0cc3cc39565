"""A batch that grows: sizes worked out by hand, refusals, and a run that equals two runs with constant batches."""

from pathlib import Path

import pytest

from tests.launcher.commands import exact, metrics, train
from training.batch_size import global_batch_size
from training.configuration import ConfigurationError, check_world, load
from training.sections import Batch, RampUp

CONFIGURATION = "configs/parity.yaml"


def grown(samples: int) -> int:
    """From 4 by 4 to 16 over 48 samples: three increases, one every 16 samples."""
    ramp = RampUp(start=4, increment=4, samples=48)
    return global_batch_size(Batch(sequence_length=8, global_batch_size=16, ramp_up=ramp), samples)


def test_sizes() -> None:
    assert [grown(samples) for samples in (0, 4, 15, 16, 31, 32, 47, 48, 1000)] == [4, 4, 4, 8, 8, 12, 12, 16, 16]


def test_without_a_ramp_the_size_is_constant() -> None:
    assert global_batch_size(Batch(sequence_length=8, global_batch_size=16), 5) == 16


@pytest.mark.parametrize(
    ("ramp", "part"),
    [
        ("{start: 32, increment: 4, samples: 10}", "ramp_up.start is 32 and must be at most"),
        ("{start: 4, increment: 5, samples: 10}", "ramp_up.increment is 5 and must divide"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(ramp: str, part: str) -> None:
    with pytest.raises(ConfigurationError, match=part):
        load(CONFIGURATION, [f"batch.ramp_up={ramp}"])


def test_every_size_is_whole_micro_batches_of_every_copy() -> None:
    configuration = load(CONFIGURATION, ["batch.ramp_up={start: 4, increment: 4, samples: 10}"])
    assert check_world(configuration, 4).data == 4
    with pytest.raises(ConfigurationError, match=r"ramp_up.start is 4 and must be divisible by .* 1 x 8"):
        check_world(configuration, 8)


def test_a_growing_run_is_one_that_stops_and_goes_on_with_larger_batches(tmp_path: Path) -> None:
    """8 sequences a step until 32 are consumed, then 16: steps 1 to 4, then 5 and 6. The second is told so by hand."""
    ramp = "batch.ramp_up={start: 8, increment: 8, samples: 32}"
    common = "training.steps=6", "training.eval_batches=1", "batch.micro_batch_size=2"
    grows, by_hand = tmp_path / "grows", tmp_path / "by_hand"
    assert train(1, CONFIGURATION, ramp, *common, f"run.output_dir={grows}", launcher="python").status == 0
    small = "batch.global_batch_size=8", "training.stop_after=4"
    assert train(1, CONFIGURATION, *small, *common, f"run.output_dir={by_hand}", launcher="python").status == 0
    assert train(1, CONFIGURATION, *common, f"run.output_dir={by_hand}", launcher="python").status == 0
    assert exact(metrics(grows)) == exact(metrics(by_hand))
    assert metrics(grows)[-1]["tokens"] == (4 * 8 + 2 * 16) * 64
