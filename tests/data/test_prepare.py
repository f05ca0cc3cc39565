"""prepare_data: what it leaves, the same bytes whoever works, complete or not at all, going on after a kill."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

import data.documents
import data.encoding
from data.indexed import IndexedDataset
from data.placing import held_out_hashes
from data.prepare import Preparation, prepare
from data.samples import mask_path
from data.tokenizer import SentencePieceTokenizer, load_tokenizer
from launcher.prepare_data import main

ROOT = Path(__file__).resolve().parents[2]
FILES = ("train.bin", "train.idx", "validation.bin", "validation.idx", "tokenizer.model")


@pytest.fixture
def corpus(tmp_path: Path, text: Callable[..., str]) -> Path:
    """30 small text files, a large one that is several parts, a JSONL file, and an empty one."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number:02}.txt").write_text(text(number) + "▁ 漢字\r\n")
    (folder / "large.txt").write_text("\n".join(text(100 + number, 2000) for number in range(120)))
    (folder / "empty.txt").write_text("")
    lines = [json.dumps({"text": text(1000 + number)}) for number in range(300)]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return folder


def bytes_of(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(output.iterdir()) if path.name != "report.json"}


def command(corpus: Path, output: Path, *more: str) -> list[str]:
    return [
        "--input",
        str(corpus),
        "--output",
        str(output),
        "--vocab-size",
        "400",
        "--validation-fraction",
        "0.1",
        *more,
    ]


def test_what_is_left(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    assert main(command(corpus, output)) == 0
    assert sorted(path.name for path in output.iterdir()) == sorted([*FILES, "report.json"])
    assert not (tmp_path / "out.partial").exists()
    report = json.loads((output / "report.json").read_text())
    assert report["train"]["documents"] + report["validation"]["documents"] == 331
    assert set(report) >= {"input_digest", "seconds", "peak_memory_mib", "train", "validation", "processes"}
    said = capsys.readouterr()
    assert "peak memory" in said.out and "tokenising 100%" in said.err and "/s" in said.err


def test_every_document_comes_back_with_one_end(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert main(command(corpus, output)) == 0
    tokenizer = load_tokenizer(output / "tokenizer.model")
    expected = [path.read_bytes().decode() for path in sorted(corpus.glob("*.txt")) if path.stat().st_size]
    expected += [json.loads(line)["text"] for line in (corpus / "rows.jsonl").read_text().splitlines()]
    found = []
    for part in ("train", "validation"):
        dataset = IndexedDataset(output / part)
        for number in range(dataset.document_count):
            ids = dataset.document(number)
            assert ids[-1] == tokenizer.end_of_document
            assert (ids == tokenizer.end_of_document).sum() == 1
            found.append(tokenizer.decode(ids.tolist()))
    assert sorted(found) == sorted(expected)


def test_held_out_by_document_number(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert main(command(corpus, output, "--seed", "3")) == 0
    order = [path.read_bytes().decode() for path in sorted(corpus.glob("*.txt")) if path.stat().st_size]
    order += [json.loads(line)["text"] for line in (corpus / "rows.jsonl").read_text().splitlines()]
    held = held_out_hashes(3, 0, len(order)) < 0.1 * 2.0**64
    tokenizer, validation = load_tokenizer(output), IndexedDataset(output / "validation")
    texts = [tokenizer.decode(validation.document(number).tolist()) for number in range(validation.document_count)]
    assert texts == [text for text, is_held in zip(order, held, strict=True) if is_held]


def test_held_out_hashes_are_even_and_depend_on_the_seed() -> None:
    shares = [(held_out_hashes(seed, 0, 100_000) < 0.01 * 2.0**64).mean() for seed in range(5)]
    assert all(0.008 < share < 0.012 for share in shares)
    assert np.array_equal(held_out_hashes(1, 500, 10), held_out_hashes(1, 0, 510)[500:])
    assert held_out_hashes(1, 2**40, 1).dtype == np.uint64


def test_at_least_one_document_is_held_out(tmp_path: Path, text: Callable[..., str]) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(text(number, 2000))
    arguments = ["--input", *map(str, sorted(tmp_path.glob("*.txt"))), "--vocab-size", "340", "--output"]
    assert main([*arguments, str(tmp_path / "out"), "--validation-fraction", "0.0001"]) == 0
    assert IndexedDataset(tmp_path / "out/validation").document_count == 1
    assert IndexedDataset(tmp_path / "out/train").document_count == 2
    assert main([*arguments, str(tmp_path / "whole"), "--validation-fraction", "0"]) == 0
    assert IndexedDataset(tmp_path / "whole/train").document_count == 3
    assert not (tmp_path / "whole/validation.idx").exists()


@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers_writes_the_same_bytes(corpus: Path, tmp_path: Path, workers: int) -> None:
    assert main(command(corpus, tmp_path / "one")) == 0
    assert main(command(corpus, tmp_path / "many", "--workers", str(workers))) == 0
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "many")
    one, many = (json.loads((tmp_path / name / "report.json").read_text()) for name in ("one", "many"))
    assert (one["input_digest"], one["train"]) == (many["input_digest"], many["train"])
    assert many["processes"] == workers


def test_a_document_whose_last_part_is_empty_still_ends(
    tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line in which a part ends may be the file's last; then nothing but the end is left for the next unit."""
    monkeypatch.setattr(data.documents, "PART", 1000)
    monkeypatch.setattr(data.documents, "SMALLEST_UNIT", 1000)
    texts = ["a b\n" * 240 + "c" * 60 + "\n", "another one"]
    for number, each in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(each)
    inputs = (str(tmp_path / "0.txt"), str(tmp_path / "1.txt"))
    prepare(Preparation(inputs, str(tmp_path / "out"), tokenizer=str(tokenizer_path), validation_fraction=0))
    dataset, tokenizer = IndexedDataset(tmp_path / "out/train"), load_tokenizer(tokenizer_path)
    assert [tokenizer.decode(dataset.document(number).tolist()) for number in range(dataset.document_count)] == texts
    assert dataset.sequence_count == 3


def test_the_output_appears_whole(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped at the very last moment, there is no output folder, and the same command finishes at once."""
    monkeypatch.setattr("os.rename", interrupt)
    assert main(command(corpus, tmp_path / "out")) == 130
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    assert main(command(corpus, tmp_path / "out")) == 0


def test_a_second_run_writes_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        assert main(command(corpus, tmp_path / name)) == 0
    assert bytes_of(tmp_path / "first") == bytes_of(tmp_path / "second")


def start(arguments: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "launcher/prepare_data.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_killed_run_goes_on_and_repeats_nothing(
    corpus: Path, tmp_path: Path, text: Callable[..., str], workers: str
) -> None:
    (corpus / "large.txt").write_text("\n".join(text(100 + number, 20_000) for number in range(35)))  # about 4 MB
    arguments = command(corpus, tmp_path / "out", "--workers", workers)
    process = start(arguments)
    deadline = time.monotonic() + 60
    while len(list((tmp_path / "out.partial/work").glob("*.npz"))) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "out").exists()
    done = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out.partial/work").glob("*.npz")}
    again = start(arguments)
    _, said = again.communicate(timeout=120)
    assert again.returncode == 0, said
    assert f"going on: {len(done)} of" in said
    assert main(command(corpus, tmp_path / "straight")) == 0
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "straight")
    assert not (tmp_path / "out.partial").exists()


def test_work_on_another_version_of_a_file_is_not_taken(
    corpus: Path, tmp_path: Path, text: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tokenizer_path: Path
) -> None:
    arguments = command(corpus, tmp_path / "out", "--tokenizer", str(tokenizer_path))
    monkeypatch.setattr("data.prepare._layout", interrupt)
    assert main(arguments) == 130
    monkeypatch.undo()
    (corpus / "00.txt").write_text(text(4711))
    assert main(arguments) == 0
    assert main(command(corpus, tmp_path / "straight", "--tokenizer", str(tokenizer_path))) == 0
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "straight")


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_killed_worker_is_told_and_the_work_kept(corpus: Path, tmp_path: Path) -> None:
    (corpus / "large.txt").write_text("some words to encode\n" * 300_000)
    process = start(command(corpus, tmp_path / "out", "--workers", "2"))
    deadline = time.monotonic() + 60
    while not list((tmp_path / "out.partial/work").glob("*.npz")) and time.monotonic() < deadline:
        time.sleep(0.005)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [child for child in children if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()]
    os.kill(int(workers[0]), signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "one that was killed" in said.splitlines()[-1] and "goes on from there" in said.splitlines()[-1]
    assert "Traceback" not in said
    assert (tmp_path / "out.partial").exists() and not (tmp_path / "out").exists()


def test_fine_tuning_data_has_a_mask(tmp_path: Path, tokenizer_path: Path, text: Callable[..., str]) -> None:
    path = tmp_path / "chat.jsonl"
    records = [{"q": "why " + text(number, 20), "a": "because " + text(900 + number, 10)} for number in range(40)]
    path.write_text("\n".join(map(json.dumps, records)))
    arguments = ["--input", str(path), "--tokenizer", str(tokenizer_path), "--prompt-key", "q", "--completion-key", "a"]
    for name, workers in (("one", "1"), ("two", "2")):
        assert main([*arguments, "--output", str(tmp_path / name), "--workers", workers]) == 0
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")
    tokenizer, dataset = load_tokenizer(tokenizer_path), IndexedDataset(tmp_path / "one/train")
    mask = np.frombuffer(mask_path(tmp_path / "one/train").read_bytes(), dtype=np.uint8)
    assert len(mask) == dataset.token_count
    by_prompt = {record["q"]: record["a"] for record in records}
    for number in range(dataset.document_count):
        first, stop = dataset.document_starts(np.array([number, number + 1]))
        ids, is_target = dataset.document(number), mask[first:stop].astype(bool)
        prompt = tokenizer.decode(ids[~is_target].tolist())
        assert tokenizer.decode(ids[is_target].tolist()) == by_prompt[prompt]
        assert is_target[-1], "the end of the completion is a target"
        assert np.all(np.diff(is_target.astype(int)) >= 0), "the prompt comes first"


def test_a_given_tokenizer_is_taken_as_it_is(corpus: Path, tmp_path: Path, tokenizer_path: Path) -> None:
    assert main(command(corpus, tmp_path / "out", "--tokenizer", str(tokenizer_path))) == 0
    assert (tmp_path / "out/tokenizer.model").read_bytes() == tokenizer_path.read_bytes()
    ids = IndexedDataset(tmp_path / "out/train").document(0)
    tokenizer = SentencePieceTokenizer(tokenizer_path)
    assert ids.tolist() == [*tokenizer.encode(tokenizer.decode(ids.tolist())), tokenizer.end_of_document]


def test_long_texts_are_encoded_in_pieces(
    tmp_path: Path, tokenizer_path: Path, text: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of many megabytes does not reach the encoder whole, and comes back whole."""
    monkeypatch.setattr(data.encoding, "LONGEST_TEXT", 500)
    texts = [text(0, 5000), "x" * 5000, "no line end but spaces " * 300, "short"]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": each}) for each in texts))
    wanted = Preparation((str(path),), str(tmp_path / "out"), tokenizer=str(tokenizer_path), validation_fraction=0)
    prepare(wanted)
    dataset, tokenizer = IndexedDataset(tmp_path / "out/train"), load_tokenizer(tokenizer_path)
    assert [tokenizer.decode(dataset.document(number).tolist()) for number in range(4)] == texts


class TestMistakes:
    """One line, status 2, and no folder left behind."""

    def refused(self, arguments: list[str], capsys: pytest.CaptureFixture[str], *parts: str) -> None:
        assert main(arguments) == 2
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        for part in parts:
            assert part in errors[0], errors[0]

    @pytest.fixture
    def output(self, tmp_path: Path) -> Path:
        return tmp_path / "out"

    @pytest.fixture(autouse=True)
    def nothing_left(self, tmp_path: Path):  # type: ignore[no-untyped-def]
        yield
        assert not (tmp_path / "out.partial").exists()
        assert not (tmp_path / "out/train.idx").exists()

    def test_no_such_input(self, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.refused(["--input", "/nowhere", "--output", str(output)], capsys, "--input /nowhere", "found nothing")

    def test_nothing_matches(self, corpus: Path, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.refused(command(corpus, output, "--include", "*.rs"), capsys, "found none", "--include")

    def test_only_empty_files(self, tmp_path: Path, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "empty.txt").write_text("")
        self.refused(["--input", str(tmp_path / "empty.txt"), "--output", str(output)], capsys, "0 bytes")

    def test_only_empty_documents(
        self, tmp_path: Path, output: Path, tokenizer_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "rows.jsonl").write_text('{"text": ""}\n' * 3)
        arguments = [
            "--input",
            str(tmp_path / "rows.jsonl"),
            "--output",
            str(output),
            "--tokenizer",
            str(tokenizer_path),
        ]
        self.refused(arguments, capsys, "at least one document with text")

    def test_an_output_that_exists(self, corpus: Path, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
        output.mkdir()
        self.refused(command(corpus, output), capsys, "--output", "does not exist yet")

    @pytest.mark.parametrize("workers", ["1", "2"])
    def test_an_output_below_a_file(
        self, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: str
    ) -> None:
        (tmp_path / "file").write_text("")
        arguments = command(corpus, tmp_path / "file" / "out", "--workers", workers)
        self.refused(arguments, capsys, f"{tmp_path / 'file' / 'out.partial'}", "written to, found: not a directory")

    def test_an_output_whose_name_is_too_long(
        self, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.refused(command(corpus, tmp_path / ("x" * 300)), capsys, "x" * 300, "found: file name too long")

    @pytest.mark.parametrize("workers", ["1", "2"])
    def test_no_room_for_the_output(
        self, corpus: Path, output: Path, capsys: pytest.CaptureFixture[str], workers: str, tokenizer_path: Path
    ) -> None:
        """A limit on the size of files stands in for a full disk: both refuse a write to an open file."""
        arguments = command(corpus / "large.txt", output, "--workers", workers, "--tokenizer", str(tokenizer_path))
        arguments += ["--validation-fraction", "0"]
        usual = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, usual[1]))
        try:
            self.refused(arguments, capsys, f"{output}.partial/work", "that can be written to, found: file too large")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, usual)

    def test_a_vocabulary_that_the_text_cannot_fill(
        self, corpus: Path, output: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        arguments = ["--input", str(corpus / "00.txt"), str(corpus / "01.txt"), "--output", str(output)]
        self.refused([*arguments, "--vocab-size", "30000"], capsys, "--vocab-size is 30000 and must be at most")

    def test_a_vocabulary_too_small_for_any_text_is_refused_before_reading(
        self, corpus: Path, output: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("data.prepare.find_files", interrupt)
        self.refused([*command(corpus, output), "--vocab-size", "-1"], capsys, "--vocab-size", "320", "found -1")

    def test_one_document_cannot_be_split(
        self, corpus: Path, output: Path, tokenizer_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        arguments = ["--input", str(corpus / "00.txt"), "--output", str(output), "--tokenizer", str(tokenizer_path)]
        self.refused(arguments, capsys, "at least 2 documents")

    def test_a_bad_fraction(self, corpus: Path, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.refused(command(corpus, output, "--validation-fraction", "1.5"), capsys, "--validation-fraction", "1.5")

    def test_a_missing_tokenizer(self, corpus: Path, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.refused(command(corpus, output, "--tokenizer", "none.model"), capsys, "none.model")

    def test_one_key_of_two(self, corpus: Path, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.refused(command(corpus, output, "--prompt-key", "q"), capsys, "expected both or neither")

    @pytest.mark.parametrize("workers", ["1", "2"])
    def test_a_bad_line(
        self, tmp_path: Path, output: Path, tokenizer_path: Path, capsys: pytest.CaptureFixture[str], workers: str
    ) -> None:
        (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": 3}\n')
        arguments = ["--input", str(tmp_path / "rows.jsonl"), "--output", str(output), "--workers", workers]
        self.refused([*arguments, "--tokenizer", str(tokenizer_path)], capsys, "rows.jsonl line 2", "found int")

    @pytest.mark.parametrize("workers", ["1", "2"])
    def test_a_bad_line_is_named_where_a_tokenizer_is_trained(
        self, tmp_path: Path, output: Path, text: Callable[..., str], capsys: pytest.CaptureFixture[str], workers: str
    ) -> None:
        lines = [json.dumps({"text": text(number)}) for number in range(40)]
        (tmp_path / "rows.jsonl").write_text("\n".join([lines[0], '{"text": broken', *lines[1:]]))
        arguments = ["--input", str(tmp_path / "rows.jsonl"), "--output", str(output), "--workers", workers]
        self.refused([*arguments, "--vocab-size", "400"], capsys, "rows.jsonl line 2: expected a JSON object")


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    said = capsys.readouterr().out
    for word in ("mpirun", "--workers", "examples", "report.json", "--completion-key"):
        assert word in said


@pytest.mark.slow
def test_a_million_short_documents_in_bounded_memory(tmp_path: Path, tokenizer_path: Path) -> None:
    """Case C8: peak memory does not grow with the number of documents; the result is the same for 1 and 8 workers."""
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        for number in range(1_000_000):
            file.write(f'{{"text": "short document number {number}"}}\n')
    for name, workers in (("one", "1"), ("eight", "8")):
        arguments = ["--input", str(path), "--tokenizer", str(tokenizer_path), "--output", str(tmp_path / name)]
        process = start([*arguments, "--workers", workers])
        said, problem = process.communicate(timeout=280)
        assert process.returncode == 0, problem
        assert "peak memory" in said
        assert json.loads((tmp_path / name / "report.json").read_text())["peak_memory_mib"] < 250
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "eight")
