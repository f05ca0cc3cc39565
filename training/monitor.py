"""What rank 0 writes while a run trains: metrics.jsonl, TensorBoard scalars, status.json, and the console.

Each step stands once in all of them. When a run resumes from step N, everything beyond N, and a line that a kill tore,
is taken out first: those steps come again. A record is flushed when it is written, so a kill loses none before it.
"""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.appender import Appender
from training.console import TrainingConsole
from training.event_file import EventFile, cut_event_files
from training.status import STATUS, State, Status, SupersededError, is_current, write_status

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
STATUS_SECONDS = 5.0
"""A running run renews its status.json this often at most."""


class Monitor:
    """Writes a run's numbers; on any rank but 0 it writes nothing and its methods do nothing.

    `resume_step` is the step that the run goes on from, 0 at its beginning; `evaluated_step`, where it is an earlier
    one, the newest that was evaluated (a stop may come before an evaluation, which then comes again). Methods raise
    SupersededError once a newer attempt has claimed the run folder: then the process must leave.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        rank: int = 0,
        resume_step: int = 0,
        evaluated_step: int | None = None,
        total_steps: int = 0,
        run_id: str = "",
        attempt: int = 0,
        tensorboard: bool = True,
        console: bool = True,
    ) -> None:
        self.run_dir = run_dir
        self._active = rank == 0
        self._tensorboard = tensorboard
        self._events: EventFile | None = None
        self._console: TrainingConsole | None = None
        self._status = Status(State.RUNNING, resume_step, run_id, attempt)
        if not self._active:
            return
        run_dir.mkdir(parents=True, exist_ok=True)
        self._set_status(self._status)
        self._open_at(resume_step, resume_step if evaluated_step is None else evaluated_step)
        if console:
            self._console = TrainingConsole(total_steps, resume_step)

    def _open_at(self, step: int, evaluated_step: int) -> None:
        cut_metrics(self.run_dir / METRICS, step, evaluated_step)
        self._metrics = Appender(self.run_dir / METRICS, self.say)
        cut_event_files(self.run_dir / TENSORBOARD, step, evaluated_step)
        if self._tensorboard:
            self._events = EventFile(self.run_dir / TENSORBOARD, step, self._status.attempt, self.say)

    def rewind(self, step: int, evaluated_step: int) -> None:
        """The run goes back to this step within one attempt: what was written of later ones is taken out."""
        if not self._active:
            return
        self._check_current()
        self._metrics.close()
        if self._events:
            self._events.close()
        self._open_at(step, evaluated_step)

    def train(self, record: Mapping[str, Any]) -> None:
        """A logged step: `step` and its numbers (DESIGN's kind "train"). Scalars are called train/KEY."""
        if not self._active:
            return
        self._write({"kind": "train", **record})
        self.scalars(record["step"], {f"train/{key}": value for key, value in record.items() if key != "step"})
        if self._console:
            self._console.train(record)
        if time.time() - self._status.updated > STATUS_SECONDS:
            self.status(State.RUNNING, record["step"])

    def validation(self, record: Mapping[str, Any]) -> None:
        """`step`, `validation_loss`, `validation_bits_per_byte`: numbers, or objects by the name of the data set.

        Scalars are called validation/loss, or validation/NAME/loss.
        """
        if not self._active:
            return
        self._write({"kind": "validation", **record})
        values: dict[str, Any] = {}
        for key, value in record.items():
            short = key.removeprefix("validation_")
            if isinstance(value, Mapping):
                values.update({f"validation/{name}/{short}": each for name, each in value.items()})
            elif key != "step":
                values[f"validation/{short}"] = value
        self.scalars(record["step"], values)
        shown = "  ".join(f"{tag} {value:.4f}" for tag, value in values.items() if value is not None)
        self.say(f"step {record['step']}  {shown}")

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Values for TensorBoard alone, by tag. What is no finite number is left out."""
        self._check_current()
        numbers = {tag: float(value) for tag, value in values.items() if _is_number(value)}
        if self._events and numbers:
            self._events.scalars(step, numbers)

    def say(self, text: str) -> None:
        """One line to the console."""
        if self._console:
            self._console.say(text)

    def status(self, state: State, step: int, reason: str | None = None, first_failing_rank: int | None = None) -> None:
        """Renews status.json."""
        if self._active:
            mine = (self._status.run_id, self._status.attempt)
            try:
                self._set_status(
                    Status(State(state), step, *mine, reason=reason, first_failing_rank=first_failing_rank)
                )
            except OSError as error:
                self.say(f"warning: {self.run_dir / STATUS} cannot be written: {error.strerror or error}")

    def _set_status(self, status: Status) -> None:
        write_status(self.run_dir, status)
        self._status = status

    def _write(self, record: Mapping[str, Any]) -> None:
        self._check_current()
        self._metrics.append(json.dumps(finite(record), allow_nan=False).encode() + b"\n")

    def _check_current(self) -> None:
        if self._active and not is_current(self.run_dir, self._status.attempt):
            raise SupersededError(f"a newer attempt has taken {self.run_dir} over")

    def sync(self) -> None:
        """Makes all records durable; called before a checkpoint is published, which relies on them."""
        if self._active:
            self._metrics.sync()
            if self._events:
                self._events.sync()

    def close(self) -> None:
        """Closes the files and the progress bar; status.json keeps what `status` said last."""
        if self._active:
            self._metrics.close()
            if self._events:
                self._events.close()
            if self._console:
                self._console.close()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def finite(value: Any) -> Any:
    """The value with every float that is not finite as None: JSON has no infinity and no NaN."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def cut_metrics(path: Path, step: int, evaluated_step: int) -> None:
    """Takes lines beyond `step`, of evaluations beyond `evaluated_step`, and torn ones, out of a metrics file.

    The file is always written anew: what a process of an earlier attempt still holds open is then another file.
    """
    if not path.exists():
        return
    temporary = path.with_name(f".{path.name}")
    with path.open(errors="replace") as old, temporary.open("w") as new:
        for line in old:
            try:
                record = json.loads(line)
                last = evaluated_step if record["kind"] == "validation" else step
                kept = line.endswith("\n") and record["step"] <= last
            except (ValueError, KeyError, TypeError):
                kept = False
            if kept:
                new.write(line)
        new.flush()
        os.fsync(new.fileno())
    temporary.replace(path)
