"""Evaluation: each token but the first predicted once, and the numbers that transformers gives."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from data.batches import ValidationData
from data.indexed import IndexedWriter, token_dtype
from data.tokenizer import load_tokenizer
from launcher import convert, evaluate
from tests.launcher.tiny_models import STDLIB, configuration, random_model, read_json, save_run, write_tokenizer

LENGTH = 128


def write_set(folder: Path, names: list[str]) -> tuple[Path, int]:
    """A prepared data set of some standard-library files, and the bytes of their text."""
    tokenizer = load_tokenizer(write_tokenizer(folder / "corpus"))
    size = 0
    with IndexedWriter(folder / "set", token_dtype(512)) as writer:
        for name in names:
            text = (STDLIB / "json" / name).read_text()
            writer.add_document([*tokenizer.encode(text), tokenizer.end_of_document])
            size += len(text.encode())
    return folder / "set", size


def evaluated(folder: Path, *arguments: object) -> dict:
    """The JSON that the command writes."""
    assert evaluate.main([*map(str, arguments), "--json", str(folder / "result.json")]) == 0
    return read_json(folder / "result.json")


def test_every_token_but_the_first_is_predicted_once_and_as_transformers_does(tmp_path: Path) -> None:
    prefix, size = write_set(tmp_path, ["__init__.py", "tool.py"])
    run = save_run(tmp_path / "run", random_model(configuration(activation="swiglu")), tensor=2, data=2)
    result = evaluated(tmp_path, run, "--data", prefix, "--batch-size", 3)

    assert convert.main(["to-hf", str(run), str(tmp_path / "out")]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = ValidationData(prefix, LENGTH).dataset
    ids = torch.from_numpy(tokens.read(0, tokens.token_count).astype(np.int64))
    total, count = 0.0, 0
    for start in range(0, len(ids) - 1, LENGTH):  # the same windows, by hand
        window = ids[start : start + LENGTH + 1].unsqueeze(0)
        with torch.no_grad():
            logits = model(window[:, :-1]).logits[0].double()
        total += torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum").item()
        count += window.shape[1] - 1
    assert (len(ids) - 1) % LENGTH  # there is a ragged end
    assert count == len(ids) - 1 == result["tokens"]
    assert result["loss"] == pytest.approx(total / count, rel=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    first = load_tokenizer(tmp_path / "corpus" / "tokenizer.model").token_bytes()[int(ids[0])]
    assert result["bytes"] == size - first  # end-of-document tokens are targets of no bytes
    assert result["bits_per_byte"] == pytest.approx(total / math.log(2) / result["bytes"], rel=1e-6)


def test_batch_size_changes_nothing_and_raw_text_is_the_prepared_set(tmp_path: Path) -> None:
    prefix, _ = write_set(tmp_path, ["__init__.py", "tool.py"])
    run = save_run(tmp_path / "run", random_model(configuration()))
    one = evaluated(tmp_path, run, "--data", prefix, "--batch-size", 1)
    files = [STDLIB / "json" / name for name in ("__init__.py", "tool.py")]
    for arguments in (["--data", prefix, "--batch-size", 64], ["--text", *files]):
        other = evaluated(tmp_path, run, *arguments)
        assert (other["tokens"], other["bytes"]) == (one["tokens"], one["bytes"])
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary(tmp_path: Path) -> None:
    """A value worked out by hand, and no padding in the softmax."""
    prefix, _ = write_set(tmp_path, ["tool.py"])
    model = random_model(configuration())
    with torch.no_grad():
        model.head.weight.zero_()
    result = evaluated(tmp_path, save_run(tmp_path / "run", model), "--data", prefix)
    assert result["loss"] == pytest.approx(math.log(515), rel=1e-6)
    assert result["perplexity"] == pytest.approx(515, rel=1e-5)


def test_the_loop_takes_losses_from_anywhere(tmp_path: Path) -> None:
    prefix, _ = write_set(tmp_path, ["tool.py"])
    data = ValidationData(prefix, LENGTH)
    seen: list[int] = []

    def sum_of_losses(batch: evaluate.MicroBatch) -> tuple[float, int]:
        assert batch.tokens.shape == (4, LENGTH)
        seen.extend(batch.sample_numbers.tolist())
        count = int((batch.targets != evaluate.NO_TARGET).sum())
        return 2.0 * count, count

    result = evaluate.evaluate(data, np.ones(512, dtype=np.int64), sum_of_losses, 4)
    assert result.loss == 2.0 and result.tokens == result.bytes == data.dataset.token_count - 1
    assert seen == list(range(-(-len(data) // 4) * 4))


@pytest.mark.parametrize("scaling", [None, "dynamic"])
def test_a_short_text_is_not_filled_up_to_a_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scaling: str | None
) -> None:
    prefix, _ = write_set(tmp_path, ["tool.py"])
    changes = {"rope_scaling": {"rope_type": scaling, "factor": 2.0, "original_max_position_embeddings": 64}}
    model = random_model(configuration(**changes if scaling else {}))
    padded = ValidationData(prefix, 3000)
    targets = padded.dataset.token_count - 1
    assert targets < 2500
    shapes: list[tuple[int, ...]] = []
    plain = evaluate.model_losses

    def noted(model: evaluate.LanguageModel) -> evaluate.SumOfLosses:
        losses = plain(model)

        def sum_of_losses(batch: evaluate.MicroBatch) -> tuple[float, int]:
            shapes.append(tuple(batch.tokens.shape))
            return losses(batch)

        return sum_of_losses

    monkeypatch.setattr(evaluate, "model_losses", noted)
    result = evaluated(tmp_path, save_run(tmp_path / "run", model), "--data", prefix, "--sequence-length", 3000)
    assert shapes == [(1, 3000 if scaling else targets)]
    token_bytes = np.zeros(configuration().vocabulary, dtype=np.int64)
    filled_up = evaluate.evaluate(padded, token_bytes, plain(model), 1)
    assert result["tokens"] == filled_up.tokens == targets
    assert result["loss"] == pytest.approx(filled_up.loss, rel=1e-6)


def test_document_masks_are_as_in_training(tmp_path: Path) -> None:
    prefix, _ = write_set(tmp_path, ["__init__.py", "tool.py", "scanner.py"])
    run = save_run(tmp_path / "run", random_model(configuration()))
    without = evaluated(tmp_path, run, "--data", prefix)
    (run / "config.yaml").write_text("data:\n  document_mask: true\n")
    masked = evaluated(tmp_path, run, "--data", prefix)
    assert masked["tokens"] == without["tokens"] and masked["loss"] != without["loss"]


def test_the_sequence_length_comes_from_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix, _ = write_set(tmp_path, ["tool.py"])
    run = save_run(tmp_path / "run", random_model(configuration()), sequence_length=None)  # type: ignore[arg-type]
    assert evaluate.main([str(run), "--data", str(prefix)]) == 2
    assert "give --sequence-length" in capsys.readouterr().err
    (run / "config.yaml").write_text(json.dumps({"batch": {"sequence_length": 64}}))
    from_file = evaluated(tmp_path, run, "--data", prefix)
    assert from_file == evaluated(tmp_path, run, "--data", prefix, "--sequence-length", 64)


def test_mistakes_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = save_run(tmp_path / "run", random_model(configuration()))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.txt").write_bytes(b"")
    for arguments, named in (
        (["--data", tmp_path / "nothing"], "nothing.idx"),
        (["--text", tmp_path / "nothing.txt"], "nothing.txt: no such file or directory"),
        (["--text", tmp_path / "latin.txt"], "expected UTF-8 text, found another byte at 3"),
        (
            ["--text", tmp_path / "empty.txt"],
            f"{tmp_path / 'empty.txt'}: expected text of at least 1 token, found none",
        ),
        (["--text", STDLIB / "json" / "tool.py", "--batch-size", 0], "--batch-size is 0"),
        (
            ["--text", STDLIB / "json" / "tool.py", "--json", tmp_path / "no" / "x.json"],
            "no/x.json: there is no folder",
        ),
    ):
        assert evaluate.main([str(run), *map(str, arguments)]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: ") and named in lines[0], lines


def test_a_place_that_cannot_take_the_result_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_late(*_: object) -> None:
        raise AssertionError("the evaluation was begun")

    monkeypatch.setattr(evaluate, "evaluate_alone", too_late)
    for place, named in (
        (tmp_path, "is a folder and must be a file"),
        (tmp_path / "no" / "x.json", "there is no folder"),
        (Path("/proc/x.json"), "no file can be made in this folder"),
    ):
        assert evaluate.main(["run", "--text", "text.txt", "--json", str(place)]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and lines[0].startswith(f"error: --json {place}") and named in lines[0], lines
    assert list(tmp_path.iterdir()) == []
