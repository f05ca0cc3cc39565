"""precision.compile: the same losses as without it; refused in one sentence where there is no compiler."""

from pathlib import Path

import pytest

from launcher.train import main
from tests.launcher.commands import largest_difference, metrics, train

CONFIGURATION = "configs/parity.yaml"


def test_without_a_compiler_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main([CONFIGURATION, "precision.compile=true", f"run.output_dir={tmp_path / 'run'}"]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert "precision.compile" in sentence and "no-such-compiler" in sentence


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        (1, ["parallel.recompute=sublayer"]),
        (2, ["parallel.tensor=2", "parallel.sequence_parallel=true", "parallel.recompute=sublayer"]),
    ],
    ids=["one process", "tensor and sequence parallel"],
)
def test_compiled_blocks_give_the_same_losses(processes: int, layout: list[str], tmp_path: Path) -> None:
    common = ["training.steps=4", "model.num_layers=2", "model.dropout=0.1", "batch.micro_batch_size=4", *layout]
    launcher = "python" if processes == 1 else "torchrun"
    for compiled in ("true", "false"):
        options = [*common, f"precision.compile={compiled}", f"run.output_dir={tmp_path / compiled}"]
        result = train(processes, CONFIGURATION, *options, launcher=launcher, timeout=1000)
        assert result.status == 0, result.error
    ours, reference = metrics(tmp_path / "true"), metrics(tmp_path / "false")
    assert largest_difference(ours, reference, "loss") < 1e-6
    assert largest_difference(ours, reference, "grad_norm") < 2e-6
