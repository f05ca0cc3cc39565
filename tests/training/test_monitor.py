"""Metrics, TensorBoard and status: each step once after any resume, and one process writes."""

import io
import json
import math
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from training.console import TrainingConsole, duration
from training.event_file import event_files
from training.monitor import Monitor
from training.status import State, Status, SupersededError, claim, is_current, read_status, write_status


def monitor(run_dir: Path, resume_step: int = 0, **options: Any) -> Monitor:
    return Monitor(run_dir, resume_step=resume_step, total_steps=160, attempt=claim(run_dir), run_id="r", **options)


def train(run: Monitor, first: int, last: int, loss: float) -> None:
    for step in range(first, last + 1):
        run.train({"step": step, "loss": loss, "grad_norm": 1.0, "learning_rate": 1e-3, "skipped": False})
        if step % 50 == 0:
            run.validation({"step": step, "validation_loss": loss, "validation_bits_per_byte": loss / 2})


def scalars(run_dir: Path, tag: str) -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def lines(run_dir: Path, kind: str = "train") -> list[dict]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == kind]


@pytest.mark.parametrize("killed", [False, True])
def test_after_a_resume_each_step_stands_once(tmp_path: Path, killed: bool) -> None:
    """To 150, again from 100 to 160, and again from 100: the reader sees 1..160 once, 101 on from the last."""
    for attempt, (first, last) in enumerate([(1, 150), (101, 160), (101, 160)], 1):
        run = monitor(tmp_path, first - 1)
        train(run, first, last, float(attempt))
        if not killed:
            run.close()
        else:  # torn ends, as a kill in the middle of a write leaves them
            with (tmp_path / "metrics.jsonl").open("a") as file:
                file.write('{"kind": "train", "step": 1')
            with event_files(tmp_path / "tensorboard")[-1].open("ab") as file:
                file.write(b"\x20\0\0\0\0\0\0\0abc")
    monitor(tmp_path, 160).close()
    expected = [(step, 1.0 if step <= 100 else 3.0) for step in range(1, 161)]
    assert scalars(tmp_path, "train/loss") == expected
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == expected
    assert scalars(tmp_path, "validation/loss") == [(50, 1.0), (100, 1.0), (150, 3.0)]
    assert [line["step"] for line in lines(tmp_path, "validation")] == [50, 100, 150]


def test_a_tensorboard_that_is_already_open_forgets_the_steps_that_come_again(tmp_path: Path) -> None:
    run = monitor(tmp_path)
    train(run, 1, 20, 1.0)
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    train(monitor(tmp_path, 10), 11, 30, 2.0)
    accumulator.Reload()
    assert [event.step for event in accumulator.Scalars("train/loss")] == list(range(1, 31))


def test_one_event_file_a_segment_and_none_from_other_ranks(tmp_path: Path) -> None:
    train(monitor(tmp_path), 1, 10, 1.0)
    other = Monitor(tmp_path, rank=1, resume_step=5)
    train(other, 6, 50, 9.0)
    other.status(State.FAILED, 50)
    other.sync()
    other.close()
    train(monitor(tmp_path, 5), 6, 10, 2.0)
    assert len(event_files(tmp_path / "tensorboard")) == 2
    train(monitor(tmp_path, 0), 1, 10, 3.0)
    assert len(event_files(tmp_path / "tensorboard")) == 1
    assert scalars(tmp_path, "train/loss") == [(step, 3.0) for step in range(1, 11)]
    assert not list((tmp_path / "tensorboard").glob(".*"))


def test_files_begun_within_one_second_are_read_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quick restarts, and process numbers that fall: the names must still rise."""
    monkeypatch.setattr("training.event_file.time.time", lambda: 1000.5)
    written = []
    for attempt, pid in enumerate((900, 80, 7, 10000)):
        monkeypatch.setattr("training.event_file.os.getpid", lambda pid=pid: pid)
        run = monitor(tmp_path, attempt)
        train(run, attempt + 1, attempt + 1, 1.0)
        assert run._events is not None
        written.append(run._events.path)
    assert event_files(tmp_path / "tensorboard") == written


def test_without_tensorboard_there_is_no_event_file(tmp_path: Path) -> None:
    train(monitor(tmp_path, tensorboard=False), 1, 2, 1.0)
    assert not (tmp_path / "tensorboard").exists() and len(lines(tmp_path)) == 2


def test_what_is_not_finite_becomes_null(tmp_path: Path) -> None:
    run = monitor(tmp_path)
    run.train({"step": 1, "loss": math.nan, "grad_norm": math.inf, "mfu": None, "skipped": True})
    run.validation({"step": 1, "validation_loss": {"wiki": 2.0, "code": math.nan}})
    record = lines(tmp_path)[0]
    assert record == {"kind": "train", "step": 1, "loss": None, "grad_norm": None, "mfu": None, "skipped": True}
    assert lines(tmp_path, "validation")[0]["validation_loss"] == {"wiki": 2.0, "code": None}
    assert scalars(tmp_path, "train/skipped") == [(1, 1.0)]
    assert scalars(tmp_path, "validation/wiki/loss") == [(1, 2.0)]


def test_an_older_attempt_writes_nothing_more(tmp_path: Path) -> None:
    old = monitor(tmp_path)
    train(old, 1, 5, 1.0)
    new = monitor(tmp_path, 3)
    for call in (
        lambda: old.train({"step": 6, "loss": 1.0}),
        lambda: old.validation({"step": 6, "validation_loss": 1.0}),
        lambda: old.status(State.STOPPED, 6),
    ):
        with pytest.raises(SupersededError):
            call()
    # Even a write that slipped past the check goes to a file that is no longer there.
    old._metrics.append(b'{"kind": "train", "step": 6}\n')
    assert old._events is not None
    old._events.scalars(6, {"train/loss": 6.0})
    train(new, 4, 4, 2.0)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    assert [step for step, _ in scalars(tmp_path, "train/loss")] == [1, 2, 3, 4]


def _claim_many(run_dir: Path, results: Any) -> None:
    results.put([claim(run_dir) for _ in range(25)])


def test_every_claim_gets_its_own_number(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=_claim_many, args=(tmp_path, results)) for _ in range(4)]
    for process in processes:
        process.start()
    numbers = sum((results.get(timeout=30) for _ in processes), [])
    for process in processes:
        process.join()
    assert sorted(numbers) == list(range(1, 101))
    assert is_current(tmp_path, 100) and not is_current(tmp_path, 99)


def test_status_of_a_process_that_is_gone_or_silent_is_failed(tmp_path: Path) -> None:
    attempt = claim(tmp_path)
    assert read_status(tmp_path) is None
    write_status(tmp_path, Status(State.RUNNING, 7, "r", attempt))
    assert read_status(tmp_path) == Status(**json.loads((tmp_path / "status.json").read_text()))
    write_status(tmp_path, Status(State.RUNNING, 7, "r", attempt, updated=1.0))
    silent = read_status(tmp_path)
    assert silent is not None and silent.state == "failed" and "step 7" in str(silent.reason)
    process = multiprocessing.get_context("fork").Process(target=os._exit, args=(0,))
    process.start()
    process.join()
    assert process.pid is not None
    write_status(tmp_path, Status(State.RUNNING, 7, "r", attempt, pid=process.pid))
    gone = read_status(tmp_path)
    assert gone is not None and gone.state == "failed"
    write_status(tmp_path, Status(State.FINISHED, 9, "r", attempt, updated=1.0))
    finished = read_status(tmp_path)
    assert finished is not None and finished.state == "finished"
    (tmp_path / "status.json").write_text("{")
    damaged = read_status(tmp_path)
    assert damaged is not None and damaged.state == "failed" and "status.json is damaged" in str(damaged.reason)


def test_the_console_prints_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    console = TrainingConsole(200, 0, stream)
    record = {"loss": 3.25, "grad_norm": 0.5, "learning_rate": 3e-4, "tokens_per_second": 12345.6, "mfu": 0.412}
    console.train({"step": 100, **record})
    console.train({"step": 200, **record, "mfu": None, "skipped": True})
    first, second = stream.getvalue().splitlines()
    assert first == "step 100/200  loss 3.2500  grad norm 0.500  lr 3.00e-04  12,346 tokens/s  MFU 41.2 %"
    assert second.endswith("12,346 tokens/s  SKIPPED (not finite)  0 s left")


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_console_draws_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    console = TrainingConsole(200, 0, stream)
    console.train({"step": 100, "loss": 3.25})
    console.say("a line [above]")
    console.close()
    assert "100/200" in stream.getvalue() and "loss 3.2500" in stream.getvalue()
    assert "a line [above]" in stream.getvalue()


def test_durations() -> None:
    assert [duration(s) for s in (42, 185, 7620, 273600)] == ["42 s", "3 min 05 s", "2 h 07 min", "3 d 04 h"]


def test_an_evaluation_that_comes_again_stands_once(tmp_path: Path) -> None:
    """A stop came before the evaluation of step 50; the next start made up for it and was killed, so it comes again."""
    for loss in (1.0, 2.0, 3.0):
        run = monitor(tmp_path, 0 if loss == 1.0 else 50, evaluated_step=None if loss == 1.0 else 49)
        if loss == 1.0:
            train(run, 1, 49, loss)
            run.train({"step": 50, "loss": loss})
        else:
            run.validation({"step": 50, "validation_loss": loss, "validation_bits_per_byte": loss / 2})
        run.close()
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 51))
    assert [(line["step"], line["validation_loss"]) for line in lines(tmp_path, "validation")] == [(50, 3.0)]
    assert scalars(tmp_path, "validation/loss") == [(50, 3.0)]
    assert [step for step, _ in scalars(tmp_path, "train/loss")] == list(range(1, 51))


def test_what_is_not_a_number_is_shown_and_written_as_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = monitor(tmp_path)
    run.validation({"step": 1, "validation_loss": math.nan, "validation_bits_per_byte": math.nan})
    run.close()
    assert "step 1  validation/loss nan  validation/bits_per_byte nan" in capsys.readouterr().out
    assert [record["validation_loss"] for record in lines(tmp_path, "validation")] == [None]


def test_bytes_that_are_no_text_are_taken_out_of_the_metrics(tmp_path: Path) -> None:
    run = monitor(tmp_path)
    train(run, 1, 3, 1.0)
    run.close()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe torn\n")
    monitor(tmp_path, resume_step=3).close()
    assert [record["step"] for record in lines(tmp_path)] == [1, 2, 3]
