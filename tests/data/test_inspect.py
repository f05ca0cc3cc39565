"""inspect_data shows what the trainer will see."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.samples import TokenSamples
from launcher.inspect_data import main
from launcher.prepare_data import main as prepare


@pytest.fixture
def prepared(tmp_path: Path, tokenizer_path: Path, text: Callable[..., str]) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": text(number, 10 + number)}) for number in range(80)))
    arguments = ["--input", str(path), "--tokenizer", str(tokenizer_path), "--output", str(tmp_path / "out")]
    assert prepare(arguments) == 0
    return tmp_path / "out/train"


def test_documents_lengths_and_samples(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main([str(prepared), "--sequence-length", "64", "--samples", "2", "--seed", "5"]) == 0
    said = capsys.readouterr().out
    samples = TokenSamples(prepared, 64, seed=5)
    dataset = samples.dataset
    assert f"documents   {dataset.document_count:,}" in said
    assert f"tokens      {dataset.token_count:,}" in said
    assert f"{len(samples):,} in an epoch" in said
    counted = [
        int(line.split("  ")[-2 if "#" in line else -1]) for line in said.splitlines() if " to " in line and "#" in line
    ]
    assert sum(counted) == dataset.document_count
    for number in range(2):
        for document in samples.documents(number):
            assert f"[document {document}]" in said
        ends = int((samples.sample(number) == 1).sum())
        shown = said.split("--- sample")[number + 1]
        assert shown.count("[end]") == ends


def test_without_a_tokenizer_ids_are_shown(
    numbered_set: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(numbered_set("set", [30, 40])), "--sequence-length", "8", "--samples", "1"]) == 0
    assert "give --tokenizer" in capsys.readouterr().out


def test_documents_without_an_end_are_told(
    write_set: Callable[..., Path], tokenizer_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = write_set("set", [[5, 6, 1], [7, 8]])
    assert main([str(prefix), "--tokenizer", str(tokenizer_path)]) == 0
    assert "1 of 2 documents do not end" in capsys.readouterr().out


def test_a_damaged_set_is_refused(write_set: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_set("set", [[5, 6, 1]])
    Path(f"{prefix}.bin").write_bytes(np.arange(2, dtype=np.uint16).tobytes())
    assert main([str(prefix)]) == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "least"), [("--sequence-length", 0, 1), ("--sequence-length", -5, 1), ("--samples", -1, 0)]
)
def test_a_size_that_is_none_is_refused_first(
    numbered_set: Callable[..., Path], capsys: pytest.CaptureFixture[str], option: str, value: int, least: int
) -> None:
    assert main([str(numbered_set("set", [30, 40])), option, str(value)]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"error: {option}: expected {least} or more, found {value}\n")
