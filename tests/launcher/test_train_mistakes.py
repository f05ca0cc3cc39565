"""Each mistake is one sentence, once, on standard error, with exit status 2, before anything is built or written."""

import shutil
import sys
from pathlib import Path

import pytest

from launcher.train import main
from tests.launcher.commands import processes_of, run, train

CONFIGURATION = "configs/parity.yaml"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["parallel.pipelin=2"], ["parallel.pipelin", "parallel.pipeline"]),
        (["parallel.tensor=3"], ["num_heads", "8", "parallel.tensor", "3"]),
        (["parallel.pipeline=2"], ["2 processes", "found 1", "deepspeed --num_gpus 2"]),
        (["parallel.pipeline=2", "parallel.zero_stage=0"], ["parallel.zero_stage", "0", "1"]),
        (["parallel.pipeline=2", "parallel.zero_stage=2"], ["parallel.zero_stage", "2", "1"]),
        (["parallel.pipeline=9"], ["parallel.pipeline", "9", "num_layers", "8"]),
        (["batch.micro_batch_size=3"], ["global_batch_size", "16", "micro_batch_size", "3"]),
        (["parallel.zero_stage=0", "precision.dtype=bf16"], ["zero_stage", "0", "bf16"]),
        (["data.train=corpus/none/train"], ["corpus/none/train.idx"]),
        (["data.tokenizer=corpus/none.model"], ["corpus/none.model"]),
        (["model.vocab_size=100"], ["model.vocab_size", "100", "512", "tokenizer.model"]),
    ],
    ids=lambda value: " ".join(value) if value and "=" in value[0] else "",
)
def test_one_process(
    arguments: list[str], parts: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In this process: none of these comes as far as a process group."""
    status = main([CONFIGURATION, f"run.output_dir={tmp_path / 'run'}", *arguments])
    output = capsys.readouterr()
    (sentence,) = output.err.splitlines()
    assert status == 2
    assert sentence.startswith("error: ")
    assert all(part in sentence for part in parts), sentence
    assert not (tmp_path / "run").exists()


def test_a_key_given_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text(Path(CONFIGURATION).read_text() + "\ntraining:\n  steps: 4\n")
    assert main([str(path)]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert "twice.yaml" in sentence and "training" in sentence


def test_a_truncated_data_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy("corpus/parity/train.idx", tmp_path / "cut.idx")
    whole = Path("corpus/parity/train.bin").read_bytes()
    (tmp_path / "cut.bin").write_bytes(whole[:-1])
    assert main([CONFIGURATION, f"data.train={tmp_path / 'cut'}", f"run.output_dir={tmp_path / 'run'}"]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert "cut.bin" in sentence and str(len(whole)) in sentence and str(len(whole) - 1) in sentence


@pytest.mark.parametrize(
    ("processes", "arguments", "part"),
    [
        (3, ["parallel.pipeline=2"], "found 3"),
        (2, ["model.vocab_size=100"], "model.vocab_size is 100"),
        (2, ["data.train=corpus/none/train"], "corpus/none/train.idx"),
    ],
    ids=["world", "tokenizer", "data"],
)
def test_several_processes_speak_once_and_leave_nothing_behind(
    processes: int, arguments: list[str], part: str, tmp_path: Path
) -> None:
    marker = f"run.output_dir={tmp_path / 'run'}"
    result = train(processes, CONFIGURATION, marker, *arguments)
    assert result.status != 0
    (sentence,) = result.mistakes
    assert part in sentence
    assert "Traceback" not in result.output + result.error
    assert not processes_of(marker)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["precision.dtype=fp16"], ["precision.dtype is fp16", "cpu", "bf16 or fp32"]),
        (["deepspeed.zero_optimization.reduce_bucket_size=big"], ["section deepspeed", "reduce_bucket_size", "big"]),
        (["deepspeed.comms_logger=5"], ["section deepspeed", "int"]),
        (["deepspeed.wall_clock_breakdown=maybe"], ["section deepspeed", "str"]),
    ],
    ids=lambda value: value[0] if "=" in value[0] else "",
)
def test_what_the_device_or_deepspeed_refuses(arguments: list[str], parts: list[str], tmp_path: Path) -> None:
    result = train(1, CONFIGURATION, f"run.output_dir={tmp_path / 'run'}", *arguments, launcher="python")
    (sentence,) = result.mistakes
    assert result.status == 2
    assert all(part in sentence for part in parts), sentence
    assert not (tmp_path / "run").exists()


def test_a_run_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    result = train(1, CONFIGURATION, f"run.output_dir={tmp_path / 'file' / 'run'}", launcher="python")
    (sentence,) = result.mistakes
    assert result.status == 2
    assert f"run.output_dir is {tmp_path / 'file' / 'run'}" in sentence and "not a directory" in sentence


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["checkpoint.resume=runs/none"], ["runs/none"]),
        (["checkpoint.resume=SAVED", "model.num_layers=4"], ["model.num_layers", "4", "SAVED", "8"]),
    ],
    ids=["no checkpoint", "another model"],
)
def test_what_cannot_be_resumed(arguments: list[str], parts: list[str], tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    if "SAVED" in arguments[0]:
        made = train(1, CONFIGURATION, f"run.output_dir={saved}", "training.stop_after=1", launcher="python")
        assert made.status == 0, made.error
    put = [text.replace("SAVED", str(saved)) for text in arguments]
    result = train(1, CONFIGURATION, f"run.output_dir={tmp_path / 'run'}", *put, launcher="python")
    (sentence,) = result.mistakes
    assert result.status == 2
    assert all(part.replace("SAVED", str(saved)) in sentence for part in parts), sentence
    assert not (tmp_path / "run").exists()


def test_help_and_show_need_no_processes() -> None:
    helped = run(sys.executable, "launcher/train.py", "--help")
    assert helped.status == 0 and "deepspeed --num_gpus" in helped.output
    shown = run(sys.executable, "launcher/train.py", CONFIGURATION, "--show", "training.steps=3")
    assert shown.status == 0 and "steps: 3" in shown.output
